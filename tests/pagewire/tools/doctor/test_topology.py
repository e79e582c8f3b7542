"""The doctor's findings on machines with two NUMA nodes, GPUs at one of them, and flags that bind."""

from pathlib import Path
from typing import Any

import pytest

from pagewire.tools.doctor.command import DoctorConfig
from pagewire.tools.doctor.finding import Finding, Level
from pagewire.tools.doctor.settings import check_settings
from pagewire.tools.doctor.topology import check_topology
from tests.pagewire.tools.doctor.machines import RecordedHost, good, smi

_CPU, _NODES = "/sys/devices/system/cpu", "/sys/devices/system/node"
_GPU_AT_NODE_1 = {"/sys/bus/pci/devices/0000:17:00.0/numa_node": "1"}


def _machine(
    root: Path, files: dict[str, str] | None = None, *, first: str = "0-7", second: str = "8-15", gpus: int = 0
) -> RecordedHost:
    """16 processors of two nodes; GPUs at node 1."""
    nodes = {f"{_NODES}/node0/cpulist": first, f"{_NODES}/node1/cpulist": second, f"{_CPU}/online": "0-15"}
    commands = smi(*[{}] * gpus) if gpus else None
    return RecordedHost(root, good(**nodes | _GPU_AT_NODE_1 | (files or {})), cpus="0-15", commands=commands)


def _found(host: RecordedHost, **flags: Any) -> dict[str, Finding]:
    config = DoctorConfig(port=0, grpc_port=0, **flags)
    return {f.check: f for f in check_topology(host, config) if f.level > Level.OK}


def test_nodes_of_different_sizes(tmp_path) -> None:
    """One executor is best where most cores are."""
    (numa,) = _found(_machine(tmp_path, first="0-3", second="4-15")).values()
    assert (numa.check, numa.level, numa.found) == ("NUMA", Level.WARNING, "node 0: 0-3, node 1: 4-15")
    assert numa.remedy.endswith("--numa-bind 1")


def test_executors_of_their_own_nodes_are_in_order(tmp_path) -> None:
    host = _machine(tmp_path)
    assert _found(host, numa_bind="auto", data_parallel_size=2) == {}
    said = {f.check: f.found for f in check_topology(host, DoctorConfig(numa_bind="auto", data_parallel_size=2))}
    assert said["core binding"] == ("executor 0: 1-7 of node 0; executor 1: 9-15 of node 1; the other services: 0,8")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"cpu_bind": "4-11", "numa_bind": "0"}, "are of node 0, 1, its memory of node 0"),
        ({"cpu_bind": "0-3", "numa_bind": "1"}, "(0-3) are of node 0, its memory of node 1"),
        ({"cpu_bind": "0-3|3-7", "data_parallel_size": 2, "numa_bind": "0"}, "compute on processor 3"),
        ({"cpu_bind": "0-15", "numa_bind": "0"}, "are of node 0, 1"),
    ],
)
def test_cores_that_do_not_fit_together(tmp_path, flags, said) -> None:
    found = _found(_machine(tmp_path), **flags)
    assert list(found) == ["core binding"]
    assert found["core binding"].level is Level.WARNING
    assert said in found["core binding"].meaning and found["core binding"].remedy


def test_hardware_threads_of_one_core_are_not_given_to_two_executors(tmp_path) -> None:
    siblings = {f"{_CPU}/cpu{n}/topology/thread_siblings_list": f"{n % 8},{n % 8 + 8}" for n in range(16)}
    host = _machine(tmp_path, siblings, first="0-15", second="")
    assert "or on the same core" in _found(host, cpu_bind="0-7|8-15", data_parallel_size=2)["core binding"].meaning
    split = _found(host, cpu_bind="0-2,8-10|4-6,12-14", data_parallel_size=2)
    assert split == {}


def test_cores_are_left_for_the_other_services(tmp_path) -> None:
    (binding,) = _found(RecordedHost(tmp_path, good()), cpu_bind="0-7").values()
    assert binding.level is Level.NOTE and "gateway, tokenizer and scheduler share processors" in binding.meaning


def test_an_executor_is_at_the_node_of_its_gpu(tmp_path) -> None:
    host = _machine(tmp_path, gpus=1)
    (numa,) = _found(host).values()
    assert (numa.level, numa.remedy.split(":")[0]) == (Level.NOTE, "--numa-bind 1")
    (wrong,) = _found(host, numa_bind="0").values()
    assert (wrong.check, wrong.level, wrong.remedy) == ("GPU nodes", Level.WARNING, "--numa-bind 1")
    assert wrong.found == "GPU 0 is at node 1, its executor is bound to 0"
    assert _found(host, numa_bind="1") == {}


def test_numa_balancing_moves_pages(tmp_path) -> None:
    host = _machine(tmp_path, {"/proc/sys/kernel/numa_balancing": "1"})
    assert list(_found(host, numa_bind="0")) == ["NUMA balancing"]


def test_flags_that_serve_would_refuse_on_that_machine(tmp_path) -> None:
    """Processors are the recorded machine's, not those that the tests run on."""
    host = _machine(tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cpu_bind": "foo"}, "--cpu-bind foo: expected auto"),
        ({"cpu_bind": "16"}, "processor 16 is not usable; usable are 0-15"),
        ({"numa_bind": "9"}, "node 9 has no usable processor; nodes with usable ones: 0, 1"),
        ({"speculative_config": '{"methd": "ngram"}'}, "unknown key methd; did you mean method?"),
        ({"port": 7, "grpc_port": 7}, "--port and --grpc-port are both"),
    ]
    for flags, said in wrong:
        (finding,) = check_settings(host, DoctorConfig(**flags))
        assert (finding.level, said in finding.found) == (Level.PROBLEM, True), finding
        assert check_topology(host, DoctorConfig(**flags)), "the other checks go on"
    (finding,) = check_settings(host, DoctorConfig(numa_bind="1", cpu_bind="8-15"))
    assert finding.level is Level.OK
