"""Groups of services that come and go while others run."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from pagewire.errors import StartupError
from pagewire.process.reasons import read_reason, tell_supervisor
from pagewire.process.supervisor import Group, Service, Supervisor
from tests.pagewire.process.stand_in import is_ready


def service(directory: Path, name: str, behaviour: str) -> Service:
    command = [sys.executable, "-m", "tests.pagewire.process.stand_in", "serve", str(directory), name, behaviour]
    return Service(name, command, partial(is_ready, directory / f"{name}.ready"), os.environ)


async def restarted(group: Group, pid: int) -> None:
    while not group.pids or pid in group.pids:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.02)


async def test_a_group_restarts_what_dies_and_stays_ended(tmp_path: Path) -> None:
    supervisor = Supervisor([service(tmp_path, "gateway", "ok")], shutdown_timeout=5, takes_signals=False)
    running = asyncio.create_task(supervisor.run(lambda: None))
    async with asyncio.timeout(60):
        group = supervisor.add([service(tmp_path, "tokenizer", "ok"), service(tmp_path, "executor", "ok")])
        assert group.waits_for == ["tokenizer", "executor"]
        await group.until_ready()
        assert not group.waits_for
        (_, executor) = pids = group.pids
        (tmp_path / "executor.ready").unlink()
        os.kill(executor, signal.SIGKILL)
        await restarted(group, executor)
        await group.until_ready()
        await supervisor.remove(group)
        assert not group.pids and not any(map(psutil.pid_exists, pids))
        events = (tmp_path / "events").read_text().splitlines()
        stops = [event for event in events if event.startswith("stop")]
        assert stops == ["stop tokenizer", "stop executor"], "in order"
        another = supervisor.add([service(tmp_path, "tokenizer", "ok")])
        await another.until_ready()
        supervisor.stop()
        assert await running == 0
        assert not another.pids
        with pytest.raises(StartupError, match="the stack ends"):
            supervisor.add([])


async def test_a_group_that_cannot_start_ends_nothing_else(tmp_path: Path) -> None:
    supervisor = Supervisor([service(tmp_path, "gateway", "ok")], shutdown_timeout=5, takes_signals=False)
    running = asyncio.create_task(supervisor.run(lambda: None))
    async with asyncio.timeout(60):
        group = supervisor.add([service(tmp_path, "tokenizer", "ok"), service(tmp_path, "executor", "exit3")])
        with pytest.raises(StartupError, match="the executor cannot start"):
            await group.until_ready()
        await supervisor.remove(group)
        assert not running.done() and not group.pids
        supervisor.fail(StartupError("no lines"))
        with pytest.raises(StartupError, match="no lines"):
            await running


def test_a_reason_is_found_among_beats() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        assert read_reason(reading) == ""
        os.write(writing, b"..")
        assert read_reason(reading) == ""
        os.write(writing, b"...")
        tell_supervisor(writing, "the model is damaged…" + "x" * 10_000)
        reason = read_reason(reading)
        assert reason.startswith("the model is damaged…x") and len(reason) < 5000
        tell_supervisor(None, "no supervisor")
    finally:
        os.close(reading)
        os.close(writing)
