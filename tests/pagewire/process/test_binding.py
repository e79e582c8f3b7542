"""The processors that the processes of a stack run on."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.config import ExecutorConfig, GatewayConfig, ServeConfig, profiles
from pagewire.errors import StartupError
from pagewire.process import binding, cpu_sets
from pagewire.process.binding import CpuBinding

_TWO_NODES = {0: range(8), 1: range(8, 16)}


def _places(usable: range = range(16), **flags) -> tuple[list[CpuBinding], CpuBinding]:
    config = ServeConfig(**flags)
    found = binding.places(config, config.data_parallel_size, usable, _TWO_NODES)
    assert found is not None
    return list(found.executors), found.others


@given(st.sets(st.integers(0, 300)))
def test_sets_are_written_as_the_kernel_writes_them(cpus: set[int]) -> None:
    assert cpu_sets.cpu_set(cpu_sets.cpu_text(sorted(cpus))) == tuple(sorted(cpus))


def test_without_flags_the_other_services_stay_off_the_processor_of_the_device_thread() -> None:
    (executor,), others = _places(num_threads=16)
    assert (executor.cpus, others.cpus) == (tuple(range(16)), tuple(range(15)))


def test_a_gpu_leaves_all_processors_to_the_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profiles, "_DRIVERS", (tmp_path,))
    monkeypatch.setattr(profiles, "_computes_on_cpu", lambda: False)
    assert binding.places(ServeConfig(num_threads=16), 1, range(16), _TWO_NODES) is None


@pytest.mark.parametrize("flags", [{"num_threads": 15}, {"device": "cuda"}, {"tensor_parallel_size": 2}])
def test_an_executor_that_leaves_processors_is_not_bound(flags: dict[str, Any]) -> None:
    config = ServeConfig(**({"num_threads": 16} | flags))
    assert binding.places(config, 1, range(16), _TWO_NODES) is None
    assert binding.places(config, 1, range(1), _TWO_NODES) is None


def test_an_executor_for_each_node() -> None:
    executors, others = _places(numa_bind="auto", data_parallel_size=2)
    assert executors == [CpuBinding(tuple(range(1, 8)), 0), CpuBinding(tuple(range(9, 16)), 1)]
    assert others.cpus == (0, 8)  # gateway, tokenizer and scheduler


def test_a_node_is_divided_among_its_executors() -> None:
    executors, others = _places(numa_bind="1", data_parallel_size=2)
    assert [place.node for place in executors] == [1, 1]
    assert [place.cpus for place in executors] == [(9, 10, 11), (12, 13, 14, 15)]
    assert others.cpus == (*range(9),)


def test_given_sets() -> None:
    executors, others = _places(cpu_bind="0-3|8-11", numa_bind="0,1", data_parallel_size=2)
    assert executors == [CpuBinding((0, 1, 2, 3), 0), CpuBinding((8, 9, 10, 11), 1)]
    assert others.cpus == (4, 5, 6, 7, 12, 13, 14, 15)
    executors, _ = _places(cpu_bind="4-7", data_parallel_size=2)
    assert executors == [CpuBinding((4, 5)), CpuBinding((6, 7))]


@given(st.integers(1, 64), st.integers(1, 9))
def test_no_processor_is_used_twice(num_cpus: int, count: int) -> None:
    """No two processes share a processor if there are enough; services other than executors have at most a few."""
    executors, others = _places(range(num_cpus), cpu_bind="auto", data_parallel_size=count)
    bound = [cpu for place in executors for cpu in place.cpus]
    assert all(place.cpus for place in executors)
    if len(bound) == num_cpus > count == 1:
        assert others.cpus == (*bound[:-1],)  # off that of the device thread
        return
    if len(bound) > count:
        assert sorted([*bound, *others.cpus]) == list(range(num_cpus))
    assert len(others.cpus) <= max(1, num_cpus // 8 + 1)


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"cpu_bind": "0-3|4"}, "2 sets for 1 executors"),
        ({"cpu_bind": "40"}, "processor 40 is not usable; usable are 0-15"),
        ({"cpu_bind": "all"}, "expected auto, or numbers of processors"),
        ({"cpu_bind": ","}, "it names no processor"),
        ({"numa_bind": "2"}, "node 2 has no usable processor; nodes with usable ones: 0, 1"),
        ({"numa_bind": "near"}, "expected auto, or numbers of nodes"),
    ],
)
def test_what_cannot_be_is_refused(flags, said) -> None:
    with pytest.raises(StartupError, match=said):
        _places(**flags)


def test_processors_of_two_kinds_are_found(tmp_path: Path) -> None:
    assert not cpu_sets.has_slow_cores([0, 1], tmp_path)
    for cpu, capacity in enumerate((1024, 1024, 446)):
        (file := tmp_path / f"system/cpu/cpu{cpu}/cpu_capacity").parent.mkdir(parents=True)
        file.write_text(f"{capacity}\n")
    assert not cpu_sets.has_slow_cores([0, 1], tmp_path) and cpu_sets.has_slow_cores([1, 2], tmp_path)
    (tmp_path / "cpu_atom").mkdir()
    (tmp_path / "cpu_atom/cpus").write_text("2\n")
    assert cpu_sets.has_slow_cores([0, 1], tmp_path)


_ASK = """
import os, sys
from pagewire.process import binding, cpu_sets
from pagewire.config import ExecutorConfig
binding.bind(ExecutorConfig(cpu_bind=sys.argv[1] or None, numa_bind=sys.argv[2] or None, rank=int(sys.argv[3]),
                            tensor_parallel_size=int(sys.argv[4])))
print(cpu_sets.cpu_text(sorted(os.sched_getaffinity(0))), open("/proc/self/numa_maps").readline().split()[1])
"""


def _bound(cpu_bind: str = "", numa_bind: str = "", rank: int = 0, ranks: int = 1) -> list[str]:
    """Processors and memory policy of a process that has bound itself."""
    argv = [sys.executable, "-c", _ASK, cpu_bind, numa_bind, str(rank), str(ranks)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


def test_a_process_binds_itself() -> None:
    cpus = cpu_sets.usable_cpus()
    assert _bound()[0] == cpu_sets.cpu_text(cpus)
    assert _bound(str(cpus[-1]))[0] == str(cpus[-1])
    if len(cpus) > 1:  # ranks of a group have parts
        of_both = cpu_sets.cpu_text(cpus[:2])
        assert [_bound(of_both, rank=rank, ranks=2)[0] for rank in (0, 1)] == [str(cpu) for cpu in cpus[:2]]


def test_a_service_starts_where_a_sandbox_forbids_to_bind_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sched_setaffinity(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def sched_setscheduler(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for call in (sched_setaffinity, sched_setscheduler):
        monkeypatch.setattr(os, call.__name__, call)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    binding.bind(GatewayConfig(cpu_bind="0"))
    place = binding.DevicePlace(ExecutorConfig(cpu_bind="0-1"))
    place.compute()
    place.stay()
    for name in ("sched_setaffinity", "sched_setscheduler"):
        assert f"{name} failed (Operation not permitted), so services and executor may take" in caplog.text


_DEVICE = """
import os, sys, threading
from pagewire.process import binding, cpu_sets
from pagewire.config import ExecutorConfig
def tell(): print(cpu_sets.cpu_text(cpu_sets.usable_cpus()), os.sched_getscheduler(0) == os.SCHED_BATCH)
binding._RESERVATION = "\\0" + sys.argv[1]
def run(target): thread = threading.Thread(target=target); thread.start(); thread.join()
place = binding.DevicePlace(ExecutorConfig(cpu_bind=cpu_sets.cpu_text(cpu_sets.usable_cpus())))
def device(): place.compute(); run(tell); place.stay(); place.compute(); place.stay(); tell()  # it starts twice
tell(); run(device)
"""


def _device(reservation: str) -> list[str]:
    command = [sys.executable, "-c", _DEVICE, reservation]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_the_device_thread_of_a_bound_executor_has_a_processor_that_the_rest_of_the_process_avoids() -> None:
    cpus, found = cpu_sets.usable_cpus(), _device(f"alone {uuid4()} ")
    if len(cpus) > 1:
        all_others, loading, device = cpu_sets.cpu_text(cpus[:-1]), cpu_sets.cpu_text(cpus), str(cpus[-1])
        assert found == [all_others, "True", loading, "False", device, "False"]
    else:
        assert found == [str(cpus[0]), "False"] * 3


def test_a_second_executor_does_not_put_its_device_thread_on_the_processor_of_the_first() -> None:
    cpus, name = cpu_sets.usable_cpus(), f"two {uuid4()} "
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as first:
        first.bind(f"\0{name}{cpus[-1]}")
        assert _device(name)[4:] == [cpu_sets.cpu_text(cpus), "False"]


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="this kernel has no NUMA")  # noqa: PTH110
def test_memory_of_a_node_is_preferred() -> None:
    node = next(number for number, cpus in binding.nodes().items() if set(cpus) & set(cpu_sets.usable_cpus()))
    assert _bound(numa_bind=str(node))[1] in (f"prefer:{node}", "default")  # a container may refuse it
