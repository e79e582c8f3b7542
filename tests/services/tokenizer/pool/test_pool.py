import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.templates.chat import Chat, ChatError
from tests.services.tokenizer.tiny_tokenizers import save_byte_level


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    return FileSource(str(save_byte_level(tmp_path)))


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(f"pagewire:{name}") or 0.0


async def until(name: str, value: float) -> None:
    while metric(name) != value:  # noqa: ASYNC110 (threads change it)
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_results_do_not_depend_on_the_kind_of_worker(source, kind) -> None:
    pool = TokenizerPool(source, size=2, kind=kind)
    try:
        chat = Chat([{"role": "user", "content": "Hi"}])
        ids, chat_ids, text, entries = await asyncio.gather(
            pool.encode_text("Hello world", add_special_tokens=True),
            pool.encode_chat(chat, add_special_tokens=False),
            pool.decode([0, 70, 71], skip_special_tokens=True),
            pool.vocabulary_entries([0, 999_999]),
        )
        assert ids == pool.codec.encode_text("Hello world", True)
        assert chat_ids == pool.codec.encode_chat(chat, False)
        assert text == pool.codec.decode([0, 70, 71], True)
        assert entries == ["<|im_start|>", ""]
        with pytest.raises(ChatError, match="at least one message"):
            await pool.encode_chat(Chat([]), add_special_tokens=False)
    finally:
        pool.close()


async def test_a_killed_worker_is_replaced_and_its_job_done_once_more(source) -> None:
    pool = TokenizerPool(source, size=1, kind="process")
    try:
        expected = await pool.encode_text("Hello world", add_special_tokens=False)
        (worker,) = pool.workers
        deaths = metric("tokenizer_pool_worker_deaths_total")
        first = worker.pid
        # Stopped, it takes a job and never answers; then it dies with the job in its hands.
        os.kill(first, signal.SIGSTOP)
        job = asyncio.create_task(pool.encode_text("Hello world", add_special_tokens=False))
        await until("tokenizer_pool_busy_workers", 1)
        os.kill(first, signal.SIGKILL)
        assert await job == expected
        assert worker.pid != first
        assert metric("tokenizer_pool_worker_deaths_total") == deaths + 1
        # One that died between two jobs is not even noticed by the next.
        os.kill(worker.pid, signal.SIGKILL)
        assert await pool.encode_text("Hello world", add_special_tokens=False) == expected
    finally:
        pool.close()


async def test_workers_end_with_the_pool(source) -> None:
    pool = TokenizerPool(source, size=2, kind="process")
    await pool.encode_text("x", add_special_tokens=False)
    pids = [worker.pid for worker in pool.workers]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_waiting_jobs_are_counted_and_can_be_cancelled(source, monkeypatch) -> None:
    pool = TokenizerPool(source, size=1)
    release = threading.Event()
    encode = pool.codec.encode_text
    monkeypatch.setattr(pool.codec, "encode_text", lambda *args: (release.wait(20), encode(*args))[1])
    try:
        jobs = [asyncio.create_task(pool.encode_text("x" * 1000, add_special_tokens=False)) for _ in range(4)]
        await until("tokenizer_pool_busy_workers", 1)
        assert metric("tokenizer_pool_queue_length") == 3
        jobs[3].cancel()
        await until("tokenizer_pool_queue_length", 2)
        release.set()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert len({tuple(result) for result in results[:3]}) == 1
        assert isinstance(results[3], asyncio.CancelledError)
        assert metric("tokenizer_pool_queue_length") == metric("tokenizer_pool_busy_workers") == 0
    finally:
        release.set()
        pool.close()


def test_a_short_text_needs_no_worker(source) -> None:
    pool = TokenizerPool(source, size=1)
    pool.close()
    assert pool.encodes_at_once("Say") and not pool.encodes_at_once("x" * 1000)
    assert pool.encode_at_once("Say", add_special_tokens=False) == pool.codec.encode_text("Say", False)


async def test_a_panic_of_the_library_is_an_ordinary_error(source, monkeypatch) -> None:
    class Panic(BaseException):
        pass

    def panic(*args) -> None:
        raise Panic("index out of bounds")

    pool = TokenizerPool(source, size=1)
    monkeypatch.setattr(pool.codec, "encode_text", panic)
    try:
        with pytest.raises(RuntimeError, match="index out of bounds"):
            await pool.encode_text("x", add_special_tokens=False)
        with pytest.raises(RuntimeError, match="index out of bounds"):
            pool.encode_at_once("x", add_special_tokens=False)
    finally:
        pool.close()


def test_a_pool_of_nothing_is_refused(source) -> None:
    with pytest.raises(ValueError, match="--tokenizer-pool-size"):
        TokenizerPool(source, size=0)
