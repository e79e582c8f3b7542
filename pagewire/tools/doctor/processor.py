"""Processors: their number and kind, and what slows them down."""

from __future__ import annotations

import math
import re

from pagewire.config import ServeConfig
from pagewire.process.cpu_sets import cpu_set, cpu_text
from pagewire.tools.doctor.finding import Finding, Findings, absent, note, ok, warning
from pagewire.tools.doctor.host import Host

# The instructions that CPU kernels use, best first: flag in /proc/cpuinfo, and its purpose.
_INSTRUCTIONS = (
    ("amx_bf16", "matrix products in tiles (AMX)"),
    ("avx512_bf16", "bfloat16 products in 512 bits"),
    ("avx512_vnni", "8-bit products in 512 bits"),
    ("avx2", "256 bits"),
    ("asimd", "NEON"),
)
_MUCH_STEALING = 0.02
# Of a command line in /proc: a service.
_SERVICE = re.compile(r"pagewire\.cli\0(?:executor|gateway|scheduler|tokenizer)\b")


def check_processor(host: Host, config: ServeConfig) -> Findings:
    usable = host.usable_cpus()
    yield _cores(host, config, usable)
    yield _siblings(host, config, usable)
    yield _instructions(host)
    yield _governor(host)
    yield _irqbalance(host)
    yield _load(host, len(usable))
    yield _stolen(host)


def _cores(host: Host, config: ServeConfig, usable: set[int]) -> Finding:
    online = set(cpu_set(host.read("/sys/devices/system/cpu/online") or "")) or usable
    quota = host.cpu_quota()
    cores = len(usable) if quota is None else min(len(usable), quota)
    found = f"{len(usable)} of {len(online)} may be used ({cpu_text(sorted(usable))})"
    if quota is not None:
        found += f", for {quota:g} cores' worth of time"
    if config.num_threads is not None and config.num_threads > math.ceil(cores):
        return warning(
            "cores",
            f"{found}; --num-threads is {config.num_threads}",
            "threads that share a core wait for each other in every product of a step",
            f"--num-threads {max(1, int(cores))}, or leave it out",
        )
    if quota is not None and quota < len(usable) and quota != int(quota):
        return note(
            "cores",
            found,
            "a fraction of a core is granted as time: threads are stopped within a step until the next period",
            "give the container whole cores, and pin it to them (cpuset)",
        )
    return ok("cores", found)


def _siblings(host: Host, config: ServeConfig, usable: set[int]) -> Finding:
    """Checks hardware threads that share a core."""
    lists = host.glob("/sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list")
    cores = {text for path in lists if (text := host.read(path)) and set(cpu_set(text)) & usable}
    if not cores:
        return absent("hyper-threads", "the kernel does not report which processors share a core")
    if len(cores) >= len(usable):
        return ok("hyper-threads", "each processor is a separate core")
    threads = config.num_threads or len(usable)
    found = f"{len(usable)} processors are {len(cores)} cores; {threads} threads compute"
    if threads <= len(cores):
        return ok("hyper-threads", found)
    return note(
        "hyper-threads",
        found,
        "two threads of one core share its arithmetic units and caches: more threads than cores seldom compute faster",
        f"try --num-threads {len(cores)}",
    )


def _instructions(host: Host) -> Finding:
    lines = (host.read("/proc/cpuinfo") or "").splitlines()
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":")[-1].split()}
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "processor")
    known = [f"{flag}: {purpose}" for flag, purpose in _INSTRUCTIONS if flag in flags]
    if not flags:
        return absent("instructions", "the kernel does not list them")
    if not known:
        return warning(
            "instructions",
            f"{name}: neither AVX2 nor NEON",
            "kernels run in plain C++, many times slower",
            "another machine",
        )
    return ok("instructions", f"{name}; {known[0]}")


def _governor(host: Host) -> Finding:
    paths = host.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    governors = {text for path in paths if (text := host.read(path))}
    if not governors:
        return absent("governor", "this system does not control the clock (a virtual machine, or the firmware does)")
    driver = host.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") or ""
    preference = host.read("/sys/devices/system/cpu/cpu0/cpufreq/energy_performance_preference") or ""
    found = f"{', '.join(sorted(governors))} ({driver or 'unknown driver'}{', ' + preference if preference else ''})"
    # In active mode, these two choose clocks themselves: their "powersave" is the "schedutil" of others.
    by_itself = driver in ("intel_pstate", "amd-pstate-epp")
    if governors <= {"performance"} or (by_itself and preference in ("performance", "balance_performance")):
        return ok("governor", found)
    return warning(
        "governor",
        found,
        "the clock rises only after work has arrived: short steps run at a low clock",
        "cpupower frequency-set -g performance",
    )


def _irqbalance(host: Host) -> Finding:
    names = (host.read(path) for path in host.glob("/proc/[0-9]*/comm"))
    if "irqbalance" not in names:
        return ok("irqbalance", "not running")
    return note(
        "irqbalance",
        "running, which is right for most machines",
        "it may move interrupts to cores that compute; without it, all may end on core 0",
        "if executors are bound to cores: exclude these by IRQBALANCE_BANNED_CPULIST, rather than stop it",
    )


def _load(host: Host, num_cores: int) -> Finding:
    text = host.read("/proc/loadavg")
    if text is None:
        return absent("load", "unknown")
    load = float(text.split()[0])
    if load <= max(1.0, 0.5 * num_cores):
        return ok("load", f"{load:g} processes want to run")
    # A server that computes, or has just started, is such a load itself.
    is_served = any(_SERVICE.search(host.read(path) or "") for path in host.glob("/proc/[0-9]*/cmdline"))
    return (note if is_served else warning)(
        "load",
        f"{load:g} processes want to run, on {num_cores} cores" + (", Pagewire's own among them" if is_served else ""),
        "steps share cores with others and become late",
        "stop the others, or bind Pagewire to other cores (--cpu-bind)",
    )


def _stolen(host: Host) -> Finding:
    """Checks the time that other virtual machines took since the start; fields of /proc/stat as in proc(5)."""
    line = next((line for line in (host.read("/proc/stat") or "").splitlines() if line.startswith("cpu ")), "")
    times = [int(word) for word in line.split()[1:9]]
    if len(times) < 8 or not sum(times):
        return absent("stolen time", "the kernel does not count it")
    share = times[7] / sum(times)
    if share <= _MUCH_STEALING:
        return ok("stolen time", f"{share:.1%} since the machine started")
    return warning(
        "stolen time",
        f"{share:.1%} since the machine started",
        "the hypervisor gave this machine's cores to others: steps are late without a visible reason on this machine",
        "an instance type with dedicated cores",
    )
