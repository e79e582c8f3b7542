"""The doctor's findings on recorded machines."""

import dataclasses
import itertools

import pytest

from pagewire.tools.doctor.command import DoctorConfig
from pagewire.tools.doctor.container import check_container
from pagewire.tools.doctor.finding import Finding, Level
from pagewire.tools.doctor.gpu import check_gpus
from pagewire.tools.doctor.memory import check_memory
from pagewire.tools.doctor.network import check_network
from pagewire.tools.doctor.processor import check_processor
from pagewire.tools.doctor.topology import check_topology
from tests.pagewire.tools.doctor.machines import RecordedHost, good, smi

_CPU = "/sys/devices/system/cpu"
_PLAIN = DoctorConfig(port=0, grpc_port=0)


def findings(host: RecordedHost, config: DoctorConfig = _PLAIN) -> list[Finding]:
    checks = (check_processor, check_topology, check_memory, check_gpus, check_network)
    return [*itertools.chain.from_iterable(check(host, config) for check in checks), *check_container(host)]


def test_a_good_machine_has_nothing_to_look_at(tmp_path) -> None:
    found = findings(RecordedHost(tmp_path, good()))
    assert {finding.level for finding in found} <= {Level.OK, Level.ABSENT}, found
    assert len(found) > 20


@pytest.mark.parametrize(
    "check, level, files, said",
    [
        ("governor", Level.WARNING, {f"{_CPU}/cpu0/cpufreq/scaling_governor": "powersave"}, "powersave|cpupower"),
        ("NUMA", Level.WARNING, {"/sys/devices/system/node/node0/cpulist": "0-3",
                                 "/sys/devices/system/node/node1/cpulist": "4-7"}, "node 1: 4-7|--numa-bind 0"),
        ("hyper-threads", Level.NOTE, {f"{_CPU}/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}"
                                       for n in range(8)}, "8 processors are 4 cores|--num-threads 4"),
        ("load", Level.WARNING, {"/proc/loadavg": "9.50 1 1 1/1 1"}, "9.5"),
        ("load", Level.NOTE, {"/proc/loadavg": "9.50 1 1 1/1 1",
                              "/proc/812/cmdline": "python\0-m\0pagewire.cli\0executor\0--model=m"}, "own among"),
        ("stolen time", Level.WARNING, {"/proc/stat": "cpu  10 0 10 70 0 0 0 10 0 0"}, "10.0%"),
        ("throttling", Level.WARNING, {"/sys/fs/cgroup/cpu.stat": "nr_periods 100\nnr_throttled 30"}, "30 of 100"),
        ("out of memory", Level.WARNING, {"/sys/fs/cgroup/memory.events": "oom 4\noom_kill 3"}, "3 processes|raise"),
        ("threads", Level.WARNING, {"/sys/fs/cgroup/pids.max": "512", "/sys/fs/cgroup/pids.current": "40"},
         "472 of 512|--pids-limit"),
        ("threads", Level.PROBLEM, {"/proc/self/cgroup": "0::/a", "/sys/fs/cgroup/a/pids.max": "100",
                                    "/sys/fs/cgroup/a/pids.current": "7"}, "93 of 100"),
        ("threads", Level.PROBLEM, {"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/pids.max": "100",
                                    "/sys/fs/cgroup/a/pids.current": "7", "/sys/fs/cgroup/a/b/pids.max": "max",
                                    "/sys/fs/cgroup/a/b/pids.current": "7"}, "93 of 100"),
        ("throttling", Level.WARNING, {"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/cpu.stat":
                                       "nr_periods 100\nnr_throttled 30", "/sys/fs/cgroup/a/b/cpu.stat":
                                       "nr_periods 0\nnr_throttled 0"}, "30 of 100"),
        ("kinds of cores", Level.NOTE, {f"{_CPU}/cpu{n}/cpufreq/cpuinfo_max_freq": "5100000" if n < 6 else "3900000"
                                        for n in range(8)}, "fast: 0-5; slow: 6-7|--cpu-bind 0-5"),
        ("irqbalance", Level.NOTE, {"/proc/812/comm": "irqbalance"}, "IRQBALANCE_BANNED_CPULIST"),
        ("swap", Level.WARNING, {"/proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 1 kB\nSwapTotal: 900000 kB\n"
                                 "SwapFree: 100000 kB"}, "781 MiB used"),
        ("huge pages", Level.WARNING, {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
         "madvise >"),
        ("reserved huge pages", Level.NOTE,
         {"/proc/meminfo": "MemTotal: 1 kB\nHugePages_Free: 512\nHugepagesize: 2048 kB"}, "512 lie idle, 1.0 GiB"),
        ("overcommit", Level.PROBLEM, {"/proc/sys/vm/overcommit_memory": "2"}, "vm.overcommit_memory=0"),
        ("map count", Level.WARNING, {"/proc/sys/vm/max_map_count": "8000"}, "65530"),
        ("backlog", Level.NOTE, {"/proc/sys/net/core/somaxconn": "128"}, "somaxconn=4096"),
        ("instructions", Level.WARNING, {"/proc/cpuinfo": "model name : old\nflags : sse2"}, "neither AVX2"),
        ("GPU", Level.WARNING, {"/proc/driver/nvidia/version": "NVRM version"}, "--gpus all"),
    ],
)  # fmt: skip
def test_each_fault_is_found_and_alone(tmp_path, check, level, files, said) -> None:
    found = findings(RecordedHost(tmp_path, good(**files)))
    worse = [finding for finding in found if finding.level > Level.OK]
    assert [(finding.check, finding.level) for finding in worse] == [(check, level)]
    text = " ".join(dataclasses.astuple(worse[0])[2:])
    for part in said.split("|"):
        assert part in text
    assert worse[0].meaning and worse[0].remedy


def test_intels_powersave_is_no_fault(tmp_path) -> None:
    """The intel_pstate driver in its active mode raises the clock by itself."""
    files = good(**{
        f"{_CPU}/cpu0/cpufreq/scaling_governor": "powersave",
        f"{_CPU}/cpu0/cpufreq/scaling_driver": "intel_pstate",
        f"{_CPU}/cpu0/cpufreq/energy_performance_preference": "balance_performance",
    })  # fmt: skip
    assert all(finding.level <= Level.OK for finding in findings(RecordedHost(tmp_path, files)))


def test_more_threads_than_a_container_has_cores(tmp_path) -> None:
    host = RecordedHost(tmp_path, good(), quota=2.0)
    (cores,) = [f for f in findings(host, DoctorConfig(port=0, grpc_port=0, num_threads=8)) if f.level > Level.OK]
    assert (cores.check, cores.level) == ("cores", Level.WARNING)
    assert "--num-threads 2" in cores.remedy


@pytest.mark.parametrize(
    "check, level, change, said",
    [
        ("persistence", Level.NOTE, {"persistence_mode": "Disabled"}, "nvidia-smi -pm 1"),
        ("ECC", Level.NOTE, {"ecc.mode.current": "Disabled"}, "nothing on HBM"),
        ("ECC", Level.PROBLEM, {"ecc.errors.uncorrected.volatile.total": "3"}, "3 uncorrectable errors"),
        ("GPU clocks", Level.WARNING, {"clocks_event_reasons.sw_thermal_slowdown": "Active"}, "sw_thermal_slowdown"),
        ("GPU power", Level.NOTE, {"power.limit": "450.00"}, "nvidia-smi -pl 700"),
        ("GPU sharing", Level.WARNING, {"compute_mode": "Exclusive_Process"}, "nvidia-smi -c 0"),
        ("GPU memory", Level.NOTE, {"memory.used": "40000"}, "39.1 GiB of 79.6 GiB"),
        ("GPU kind", Level.PROBLEM, {"compute_cap": "7.5"}, "Ampere"),
        ("PCIe", Level.WARNING, {"pcie.link.width.current": "8"}, "8 of 16 lanes"),
    ],
)
def test_each_fault_of_a_gpu_is_found(tmp_path, check, level, change, said) -> None:
    sound = RecordedHost(tmp_path / "sound", good(), commands=smi({}))
    faulty = RecordedHost(tmp_path / "faulty", good(), commands=smi(change))
    before = {(f.check, f.level) for f in check_gpus(sound, _PLAIN)}
    assert (check, level) not in before
    (new,) = [f for f in check_gpus(faulty, _PLAIN) if (f.check, f.level) not in before]
    assert (new.check, new.level) == (check, level)
    assert said in " ".join((new.found, new.meaning, new.remedy))


def test_gpus_of_two_sockets(tmp_path) -> None:
    """The doctor finds the NUMA nodes of GPUs by their bus addresses."""
    files = good(**{"/sys/bus/pci/devices/0000:17:00.0/numa_node": "1"})
    host = RecordedHost(tmp_path, files, commands=smi({}, {"pci.bus_id": "00000000:98:00.0"}, topology="PCIe"))
    found = {f.check: f for f in check_gpus(host, DoctorConfig(tensor_parallel_size=2, port=0, grpc_port=0))}
    assert found["links"].level is Level.NOTE
    assert "SYS" in found["links"].found
    (first, second) = [f for f in check_gpus(host, _PLAIN) if f.check == "PCIe"]
    assert "NUMA node 1" in first.found
    assert "NUMA" not in second.found
    (too_many,) = [f for f in check_gpus(host, DoctorConfig(tensor_parallel_size=4)) if f.check == "GPUs"]
    assert too_many.level is Level.PROBLEM


def test_a_driver_with_older_names_of_fields(tmp_path) -> None:
    """An older driver returns no answer at all to a query with a field that it does not know."""
    (query, topology) = smi({}).values()
    commands = {"clocks_throttle_reasons.hw_slowdown": query, "topo -m": topology}
    host = RecordedHost(tmp_path, good(), commands=commands)
    assert [f.level for f in check_gpus(host, _PLAIN) if f.check == "GPU clocks"] == [Level.OK]


def test_a_driver_that_is_too_old(tmp_path, monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for driver, level in (("580.65.06", Level.OK), ("550.54", Level.PROBLEM)):
        host = RecordedHost(tmp_path / driver, good(), commands=smi({"driver_version": driver}))
        assert [f.level for f in check_gpus(host, _PLAIN) if f.check == "driver"] == [level]


@pytest.mark.parametrize(
    ("files", "level", "said"),
    [
        ({}, Level.NOTE, "--pipeline-parallel-size over nodes"),
        ({"ports/1/state": "1: DOWN"}, Level.WARNING, "ibstat"),
        ({"ports/1/state": "4: ACTIVE"}, Level.OK, ""),
        ({"ports/1/state": "4: ACTIVE", "modules": "nvidia 1 0"}, Level.NOTE, "modprobe nvidia_peermem"),
        ({"ports/1/state": "4: ACTIVE", "modules": "nvidia 1 0\nnvidia_peermem 1 0"}, Level.OK, ""),
    ],
)
def test_what_ranks_on_several_nodes_talk_over(tmp_path, files, level, said) -> None:
    paths = {f"/proc/{name}" if name == "modules" else f"/sys/class/infiniband/mlx5_0/{name}": text
             for name, text in files.items()}  # fmt: skip
    config = DoctorConfig(tensor_parallel_size=2, distributed_executor_backend="ray", port=0, grpc_port=0)
    (fabric,) = [f for f in check_network(RecordedHost(tmp_path, good(**paths)), config) if f.check == "fabric"]
    assert (fabric.level, said in fabric.remedy) == (level, True)


def test_ports_and_keys(tmp_path) -> None:
    config = DoctorConfig(host="0.0.0.0", port=0, grpc_port=0)
    host = RecordedHost(tmp_path, good(), descriptors=1024)
    found = {f.check: f.level for f in check_network(host, config)}
    assert found["exposure"] is Level.WARNING
    assert found["descriptors"] is Level.WARNING
