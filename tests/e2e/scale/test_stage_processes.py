"""An executor with two stages in two processes, with the real scheduler, has the tokens of the whole model."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.line import free_port
from tests.e2e.scale.test_ranks import NUM_TOKENS, ending, expected, generate, model, running, sockets, until_gone
from tests.makers.certificates import Authority

__all__ = ["expected", "model", "sockets"]  # fixtures
STAGES = ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"]


async def test_requests_go_on_when_a_stage_is_killed(model: Path, expected: list[int], sockets: Path) -> None:
    async with running(sockets, *STAGES, "--model", str(model)) as (executor, stub), asyncio.timeout(120):
        undisturbed = await generate(stub, NUM_TOKENS)
        assert undisturbed[: len(expected)] == expected
        begun, victim = asyncio.Event(), executor.follower
        generating = [asyncio.create_task(generate(stub, NUM_TOKENS, begun)) for _ in range(3)]
        await begun.wait()
        os.kill(victim, signal.SIGKILL)
        assert not any(task.done() for task in generating)
        assert await asyncio.gather(*generating) == [undisturbed] * 3
        await until_gone(victim)
        assert executor.endings == [-signal.SIGKILL], "the leader ends as if killed, so that no request is a suspect"
        assert "rank 1 of the executor" in executor.log


@pytest.mark.slow
async def test_stages_on_other_machines_meet_over_tcp(
    model: Path, expected: list[int], sockets: Path, tmp_path: Path
) -> None:
    """Two processes each, which show each other certificates."""
    external = ["--distributed-executor-backend", "external", "--leader", f"127.0.0.1:{free_port()}"]
    external += ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--model", str(model)]
    for name, path in Authority(tmp_path).issue("ranks").flags.items():
        external += [f"--{name.replace('_', '-')}", path]
    async with running(sockets, *external) as (executor, stub), asyncio.timeout(100):
        followers = [executor.start("--rank", str(rank)) for rank in (1, 2, 3)]
        found = await asyncio.gather(*(generate(stub, len(expected)) for _ in range(3)))
        assert found == [expected] * 3
        executor.process.kill()
        assert [await ending(follower) for follower in followers] == [1, 1, 1]
