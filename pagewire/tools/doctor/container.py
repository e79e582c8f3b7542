"""Limits of the control group (container, systemd unit, session), and whether they have been too low."""

from __future__ import annotations

from pagewire.tools.doctor.finding import Finding, Findings, ok, problem, warning
from pagewire.tools.doctor.host import Host

_MUCH_THROTTLING = 0.01
_ENOUGH_TASKS = 1000  # a stack has some hundred threads, and those that compute


def check_container(host: Host) -> Findings:
    yield _throttled(host)
    yield _killed(host)
    yield _tasks(host)


def _counts(text: str | None) -> dict[str, int]:
    lines = (line.split() for line in (text or "").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def _throttled(host: Host) -> Finding:
    groups = [_counts(text) for (text,) in host.of_groups("cpu", "cpu.stat")]
    limited = [(counts["nr_periods"], counts.get("nr_throttled", 0)) for counts in groups if counts.get("nr_periods")]
    periods, throttled = max(limited, key=lambda one: one[1] / one[0], default=(0, 0))
    if not periods or throttled / periods <= _MUCH_THROTTLING:
        return ok("throttling", f"{throttled} of {periods} periods" if periods else "no quota")
    return warning(
        "throttling",
        f"{throttled} of {periods} periods",
        "the container used up its processor time and was stopped until the next period, by up to 100 ms",
        "raise its CPU limit, or lower --num-threads to it",
    )


def _killed(host: Host) -> Finding:
    """Checks for processes that the kernel killed since the group was created;
    https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.events."""
    groups = host.of_groups("memory", "memory.events") or host.of_groups("memory", "memory.oom_control")
    events = _counts(groups[0][0] if groups else None)
    killed = events.get("oom_kill", 0)
    if not killed:
        return ok("out of memory", "no process was killed")
    return warning(
        "out of memory",
        f"{killed} processes of this container were killed",
        "the container reached its limit: this kills executors, and their requests start again elsewhere",
        "raise the container's memory limit, or lower --kv-cache-memory-bytes and --max-num-batched-tokens",
    )


def _tasks(host: Host) -> Finding:
    numbers = [(limit.strip(), used.strip()) for limit, used in host.of_groups("pids", "pids.max", "pids.current")]
    limits = [(int(limit) - int(used), limit) for limit, used in numbers if limit.isdigit() and used.isdigit()]
    if not limits:
        return ok("threads", "as many as memory allows")
    left, limit = min(limits)
    found = f"{left} of {limit} processes and threads are left"
    if left >= _ENOUGH_TASKS:
        return ok("threads", found)
    remedy = "docker run --pids-limit, TasksMax= of a systemd unit, podPidsLimit of the kubelet"
    if left >= _ENOUGH_TASKS // 4:
        return warning("threads", found, "a service that cannot start a thread dies under load", remedy)
    return problem("threads", found, "the services of a stack have more: one of them will not start", remedy)
