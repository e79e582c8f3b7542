"""Executors on a Ray cluster of some nodes, which are processes of this machine; the executors are fakes."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewire.wire import health

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagewire[ray]'")
pytestmark = pytest.mark.slow  # a cluster of three nodes
REPOSITORY = Path(__file__).parents[4]
FAKE_RANK = "tests.pagewire.stack.ray_executors.fake_rank"
NODE: dict[str, Any] = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head that runs nothing, and two nodes with room for one executor each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token to the home directory
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(REPOSITORY))  # of the nodes, as if Pagewire were installed there
        patience = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}  # else 15 s
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": patience, **NODE})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, wait=False, **NODE)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()


class Kept:
    """The executors that are kept there."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path, log: Path) -> None:
        self.process, self._file, self._log = process, file, log

    @property
    def addresses(self) -> list[str]:
        return self._file.read_text().splitlines() if self._file.exists() else []

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-5000:]
            time.sleep(0.05)

    def all_serve(self, count: int) -> bool:
        return len(self.addresses) == count and all(map(serves, self.addresses))


def serves(address: str) -> bool:
    return health.grpc_problem(address, "pagewire.v1.ExecutorService") is None


def executor_at(address: str) -> psutil.Process:
    """The executor's process; its parent is the actor's."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if FAKE_RANK in line and any(part.endswith(address) for part in line):
            return process
    raise AssertionError(f"no process listens on {address}")


@contextmanager
def keeping(cluster: Any, directory: Path, count: int, stages: int = 1) -> Iterator[Kept]:
    file, log = directory / "executors.txt", directory / "log"
    command = [sys.executable, "-m", "tests.pagewire.stack.ray_executors.keep_fakes"]
    command += [cluster.address, str(file), str(count), str(stages)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    kept = Kept(process, file, log)
    try:
        kept.wait(lambda: kept.all_serve(count))
        yield kept
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def kept(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    with keeping(cluster, tmp_path_factory.mktemp("ray"), 2) as kept:
        yield kept


def test_an_executor_that_dies_comes_back_where_it_was(kept: Kept) -> None:
    before = kept.addresses
    executor = executor_at(before[0])
    executor.send_signal(signal.SIGKILL)
    executor.wait(10)
    kept.wait(lambda: kept.all_serve(2))
    assert kept.addresses == before
    assert executor_at(before[0]).parent() != executor


def test_an_actor_that_dies_takes_its_executor_along_and_is_started_again(kept: Kept) -> None:
    before = kept.addresses
    executor = executor_at(before[0])
    actor = executor.parent()
    assert actor is not None
    actor.send_signal(signal.SIGKILL)
    executor.wait(10)
    kept.wait(lambda: before[0] not in kept.addresses)
    kept.wait(lambda: kept.all_serve(2))
    assert before[1] in kept.addresses, "the other was left alone"


def test_an_executor_whose_node_goes_is_started_on_one_that_joins(cluster: Any, kept: Kept) -> None:
    before = kept.addresses
    actor = executor_at(before[0]).parent()
    assert actor is not None
    (node,) = (one for one in cluster.worker_nodes if one.all_processes["raylet"][0].process.pid == actor.ppid())
    cluster.remove_node(node, allow_graceful=False)
    kept.wait(lambda: kept.addresses == before[1:])
    cluster.add_node(num_cpus=1, wait=False, **NODE)
    kept.wait(lambda: kept.all_serve(2))
    assert kept.addresses[0] == before[1], "the other was left alone"


def test_all_of_it_ends_with_the_process_that_keeps_it(kept: Kept) -> None:
    executors = [executor_at(address) for address in kept.addresses]
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(60) == 0
    psutil.wait_procs(executors, timeout=10)
    assert not any(executor.is_running() for executor in executors)
    assert not kept.addresses


def test_an_executor_with_stages_on_two_nodes_is_replaced_as_a_whole(cluster: Any, tmp_path: Path) -> None:
    with keeping(cluster, tmp_path, 1, stages=2) as kept:
        leader, other = stages_of(kept)
        before = kept.addresses
        assert leader[1].ppid() != other[1].ppid(), "each stage is on a node of its own"
        other[1].send_signal(signal.SIGKILL)
        psutil.wait_procs([leader[0], other[0]], timeout=30)
        assert not leader[0].is_running() and not other[0].is_running()
        kept.wait(lambda: kept.addresses != before and kept.all_serve(1))
        assert not {leader[1], other[1]} & {actor for _, actor in stages_of(kept)}
        kept.process.send_signal(signal.SIGTERM)
        assert kept.process.wait(60) == 0


def stages_of(kept: Kept) -> list[tuple[psutil.Process, psutil.Process]]:
    """The leader and its actor, and those of the other stage."""
    leader = executor_at(kept.addresses[0])
    found = [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[-2:] == [FAKE_RANK, ""]]
    (other,) = found
    actors = leader.parent(), other.parent()
    assert actors[0] is not None and actors[1] is not None
    return [(leader, actors[0]), (other, actors[1])]
