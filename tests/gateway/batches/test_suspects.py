"""Lines that end the gateway: the processes after it find them, and refuse them."""

import asyncio
import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.gateway.batches import suspects
from pagewire.gateway.batches.suspects import Suspects, failures_file
from pagewire.process import process
from tests.gateway.batches.conftest import Official
from tests.gateway.batches.test_batches import chat, content, end, start
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

# Handles line 7 of a batch until it is killed, or fails as a watchdog lets it.
PROCESS = """
import asyncio, sys, time
from pathlib import Path
from pagewire.gateway.batches.suspects import Suspects
from pagewire.process.watchdog import end_process
async def main():
    suspects = Suspects(Path(sys.argv[1]))
    async with suspects.handling("batch_a", 7, is_suspect=False):
        print("handles", flush=True)
        if sys.argv[2] == "hangs":
            end_process("it hangs")
        time.sleep(600)
asyncio.run(main())
"""


def after_a_process(folder: Path, how: str, number: int | None, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Returns the failures that are known after one process. number: of the signal that ends it, for its supervisor."""
    (folder / "batch_a").touch()  # it runs
    with subprocess.Popen([sys.executable, "-c", PROCESS, str(folder), how], stdout=subprocess.PIPE) as handling:
        assert handling.stdout is not None and handling.stdout.readline() == b"handles\n"
        if number is not None:
            handling.send_signal(number)
        code = handling.wait(60)
    monkeypatch.setenv(process.PREDECESSOR, str(code))
    monkeypatch.setenv(process.PREDECESSOR_PID, str(handling.pid))
    found = Suspects(folder)
    found.close()
    return dict(found.failures("batch_a"))


@pytest.mark.parametrize(
    ("how", "number", "failures"),
    [("hangs", None, {7: 1}), ("waits", signal.SIGABRT, {7: 1}), ("waits", signal.SIGKILL, {7: 0.5})],
)
def test_failures_count_and_an_end_for_an_unknown_reason_counts_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, number: int | None, failures: dict[int, float]
) -> None:
    assert after_a_process(tmp_path, how, number, monkeypatch) == failures
    assert not list(tmp_path.glob("handling-*"))


def test_failures_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert after_a_process(tmp_path, "hangs", None, monkeypatch) == {7: 1}
    assert after_a_process(tmp_path, "hangs", None, monkeypatch) == {7: 2}


def test_what_a_living_process_handles_is_left_alone(tmp_path: Path) -> None:
    living = Suspects(tmp_path)
    Suspects(tmp_path).close()
    assert list(tmp_path.glob("handling-*"))
    living.close()


@pytest.fixture
def handled(tmp_path: Path) -> Iterator[tuple[Suspects, Path]]:
    """Yields the suspects of a process, and the file of what it handles."""
    found = Suspects(tmp_path)
    yield found, next(tmp_path.glob("handling-*"))
    found.close()


async def test_a_line_that_waits_for_its_tokens_is_not_handled(handled: tuple[Suspects, Path]) -> None:
    found, path = handled
    async with found.handling("batch_a", 7, is_suspect=False):
        assert path.read_text() == "batch_a 7\n"
        async with found.handling("batch_b", 1, is_suspect=False):
            assert path.read_text() == "batch_a 7\nbatch_b 1\n"
        await eventually(lambda: not path.read_text())


async def test_suspects_are_handled_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "HANDLED_S", 60.0)
    found, handled = Suspects(tmp_path), set[int]()

    async def handle(number: int) -> None:
        is_suspect = number % 3 == 0
        async with found.handling("batch_a", number, is_suspect=is_suspect):
            handled.add(number)
            for _ in range(3):
                await asyncio.sleep(0.001)
                assert handled == {number} if is_suspect else all(one % 3 for one in handled)
            handled.discard(number)

    async with asyncio.timeout(20):
        await asyncio.gather(*(handle(number) for number in range(20)))
    found.close()


async def test_what_cannot_be_recorded_is_handled_nevertheless(
    handled: tuple[Suspects, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(suspects.os, "pwrite", full)
    for number in range(3):
        async with handled[0].handling("batch_a", number, is_suspect=True):
            pass
    assert caplog.text.count("No space left on device") == 1


def test_a_running_process_finds_the_failures_of_others(tmp_path: Path) -> None:
    found = Suspects(tmp_path)
    (tmp_path / "batch_a").touch()
    (tmp_path / "handling-1-of-another").write_text("batch_a 7\nbatch_over 1\n")
    assert dict(found.failures("batch_a")) == {7: 0.5}
    assert dict(found.failures("batch_a")) == {7: 0.5}
    found.close()
    assert {path.name for path in tmp_path.iterdir()} == {"batch_a", "batch_a.failures"}


async def test_a_line_that_was_handled_at_two_failures_is_answered_with_an_error(
    fake: FakeTokenizer, address: str, official: Official
) -> None:
    fake.running.clear()
    async with running_gateway(address) as client:
        ai = official(client)
        created = await start(ai, [chat(number) for number in range(4)])
    folder = Path(address.removeprefix("unix:")).parent / "data" / "batches"
    failures_file(folder, created.id).write_text("2\n3\n2 unknown\n2 unknown\n")
    fake.running.set()
    async with running_gateway(address) as client:
        await wait_ready(client)
        ai = official(client)
        batch = await end(ai, created.id)
        assert (batch.status, batch.request_counts.to_dict()) == (
            "completed",
            {"total": 4, "completed": 3, "failed": 1},
        )
        (refused,) = await content(ai, batch.error_file_id)
    assert refused["custom_id"] == "q1" and refused["response"]["status_code"] == 500
    assert refused["response"]["body"]["error"]["code"] == "gateway_died"
    assert not failures_file(folder, created.id).exists()
