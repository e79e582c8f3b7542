"""An executor with two stages on different nodes of a Ray cluster has the tokens of the whole model."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagewire[ray]'")

from pagewire.wire.discovery.file import AddressesInFile
from tests.e2e.line import REPOSITORY
from tests.e2e.scale.test_ranks import expected, generate, model, sockets
from tests.e2e.stack.test_scheduler_and_executor import scheduler
from tests.pagewire.stack.ray_executors.test_cluster import cluster

__all__ = ["cluster", "expected", "model", "sockets"]  # fixtures
pytestmark = pytest.mark.slow  # what a cluster and twelve processes that import torch take

NUM_TOKENS = 300
FLAGS = ["--device", "cpu", "--dtype", "float32", "--load-format", "dummy", "--max-model-len", "512"]
FLAGS += ["--kv-cache-memory-bytes", "16MiB", "--num-threads", "1", "--pipeline-parallel-size", "2"]


@contextmanager
def kept(address: str, model: Path, directory: Path) -> Iterator[Path]:
    """The file of its address."""
    file, log = directory / "executors.txt", directory / "log"
    command = [sys.executable, "-m", "pagewire.cli", "ray-executors", str(model), *FLAGS]
    command += ["--ray-address", address, "--address-file", str(file)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out)
    try:
        yield file
        assert process.poll() is None, log.read_text()[-5000:]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    except BaseException:
        print(log.read_text()[-20_000:])
        raise
    finally:
        process.kill()
        process.wait()


def rank(number: int, model: Path) -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        own = next((part for part in line if part.startswith("--rank=")), "--rank=0")
        if "executor" in line and f"--model={model}" in line and own == f"--rank={number}":
            return process
    raise AssertionError(f"there is no rank {number}")


async def test_requests_go_on_when_a_stage_or_its_actor_dies(
    cluster: Any, model: Path, expected: list[int], sockets: Path, tmp_path: Path
) -> None:
    with kept(cluster.address, model, tmp_path) as file:
        async with scheduler(sockets, "scheduler", discovery=AddressesInFile(file)) as stub, asyncio.timeout(240):
            undisturbed = await generate(stub, NUM_TOKENS)
            assert undisturbed[: len(expected)] == expected
            for of_actor in (False, True):
                begun, leader, victim = asyncio.Event(), rank(0, model), rank(1, model)
                generating = [asyncio.create_task(generate(stub, NUM_TOKENS, begun)) for _ in range(3)]
                await begun.wait()
                actor = victim.parent()
                assert actor is not None and not any(task.done() for task in generating)
                (actor if of_actor else victim).kill()
                assert await asyncio.gather(*generating) == [undisturbed] * 3
                assert not leader.is_running() and not victim.is_running() and actor.is_running() != of_actor
