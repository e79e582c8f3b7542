"""What the control group (container, systemd unit, session) allows, and whether that has been too little."""

from __future__ import annotations

from pagewire.doctor.finding import Finding, Findings, ok, problem, warning
from pagewire.doctor.host import Host

_MUCH_THROTTLING = 0.01
_ENOUGH_TASKS = 1000  # threads of a stack: some hundred, and those that compute


def check_container(host: Host) -> Findings:
    yield _throttled(host)
    yield _killed(host)
    yield _tasks(host)


def _counts(text: str | None) -> dict[str, int]:
    lines = (line.split() for line in (text or "").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}


def _throttled(host: Host) -> Finding:
    text = host.of_group("cpu", "cpu.stat")
    counts = _counts(text)
    periods, throttled = counts.get("nr_periods", 0), counts.get("nr_throttled", 0)
    if not periods or throttled / periods <= _MUCH_THROTTLING:
        return ok("throttling", f"{throttled} of {periods} periods" if periods else "no quota")
    return warning(
        "throttling",
        f"{throttled} of {periods} periods",
        "the container used up its processor time and was stopped until the next period, by up to 100 ms",
        "raise its CPU limit, or lower --num-threads to it",
    )


def _killed(host: Host) -> Finding:
    """By the kernel, since the group was made; https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.events."""
    events = _counts(host.of_group("memory", "memory.events") or host.of_group("memory", "memory.oom_control"))
    killed = events.get("oom_kill", 0)
    if not killed:
        return ok("out of memory", "no process was ended for it")
    return warning(
        "out of memory",
        f"{killed} processes of this container were ended for it",
        "it took what its limit allows: an executor dies so, and its requests begin again elsewhere",
        "raise the container's memory limit, or lower --kv-cache-memory-bytes and --max-num-batched-tokens",
    )


def _tasks(host: Host) -> Finding:
    limit, used = host.of_group("pids", "pids.max"), host.of_group("pids", "pids.current")
    if limit is None or not limit.isdigit():
        return ok("threads", "as many as memory allows")
    left = int(limit) - (int(used) if used and used.isdigit() else 0)
    found = f"{left} of {limit} processes and threads are left"
    if left >= _ENOUGH_TASKS:
        return ok("threads", found)
    remedy = "docker run --pids-limit, TasksMax= of a systemd unit, podPidsLimit of the kubelet"
    if left >= _ENOUGH_TASKS // 4:
        return warning("threads", found, "a service that cannot start a thread dies under load", remedy)
    return problem("threads", found, "the services of a stack have more: one of them will not start", remedy)
