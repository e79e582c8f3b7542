"""The tokenizer pool: prompts are rendered and encoded by workers, not on the event loop, which serves everybody.

Threads by default: the Rust tokenizer releases the interpreter lock while it encodes. Processes where chat templates
are heavy Python work, or a tokenizer might crash. Either way one thread stands for each worker; a process worker is
what its thread talks to. Short texts are the exception: to ask a thread takes longer than to encode one.
"""

import asyncio
import logging
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pagewire.process import usable_cores
from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.chat import Chat
from pagewire.services.tokenizer.codec import Codec, CodecSource
from pagewire.services.tokenizer.images import ImageReader, NoImages
from pagewire.services.tokenizer.input_encoding import Cuts, EncodedInput
from pagewire.worker_process import WorkerDiedError, WorkerProcess

logger = logging.getLogger(__name__)

MAX_DEFAULT_SIZE = 8
# Characters; they take 100 microseconds at most. Asking a thread takes 70 more, and waits for a core where all compute.
SHORT_TEXT = 256


class TokenizerPool:
    """`size` workers. Calls wait in order of arrival while all are busy."""

    def __init__(self, source: CodecSource, *, size: int | None = None, kind: str = "thread") -> None:
        """Loads the tokenizer, which the caller's thread waits for. kind: "thread" or "process"; processes load it too.

        Raises ValueError if the tokenizer cannot be loaded, or size is below 1.
        """
        self.size = min(usable_cores(), MAX_DEFAULT_SIZE) if size is None else size
        if self.size < 1:
            raise ValueError(f"--tokenizer-pool-size is {size}; it must be at least 1")
        self.codec = Codec(source)
        self.images: ImageReader = NoImages("this model reads no images")  # who reads those of chats
        self.workers = [WorkerProcess(partial(Codec, source)) for _ in range(self.size)] if kind == "process" else []
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="tokenizer")
        stats.POOL_WORKERS.set(self.size)

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self._call("encode_text", text, add_special_tokens)

    def encodes_at_once(self, text: str) -> bool:
        """Whether `encode_at_once` takes it: a process worker is there to be the one that a crash takes."""
        return len(text) <= SHORT_TEXT and not self.workers

    def encode_at_once(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A short text, on the caller's thread."""
        token_ids: list[int] = self._work("encode_text", (text, add_special_tokens))
        return token_ids

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Tokens that would write one of the words."""
        return await self._call("encode_words", words)

    async def encode_inputs(
        self, texts: Sequence[tuple[str, str | None]], *, add_special_tokens: bool, cuts: Cuts
    ) -> list[EncodedInput]:
        """Raises ValueError."""
        return await self._call("encode_inputs", texts, add_special_tokens, cuts)

    async def encode_chat(self, chat: Chat, *, add_special_tokens: bool, image_texts: Sequence[str] = ()) -> list[int]:
        """image_texts: what stands for each of the chat's images. Raises ChatError."""
        return await self._call("encode_chat", chat, add_special_tokens, self.images.image_token, image_texts)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._call("decode", token_ids, skip_special_tokens)

    async def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        return await self._call("vocabulary_entries", token_ids)

    def close(self) -> None:
        """Calls that wait are dropped; one that runs is waited for."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.close()
        self.images.close()

    async def _call(self, method: str, *args: Any) -> Any:
        submitted = time.monotonic()
        stats.POOL_QUEUE_LENGTH.inc()
        job = self._threads.submit(self._run, submitted, method, args)
        # A job that was cancelled while it waited never runs: its place in the queue is given back here.
        job.add_done_callback(lambda job: stats.POOL_QUEUE_LENGTH.dec() if job.cancelled() else None)
        return await asyncio.wrap_future(job)

    def _run(self, submitted: float, method: str, args: tuple[Any, ...]) -> Any:
        started = time.monotonic()
        stats.POOL_QUEUE_LENGTH.dec()
        stats.POOL_WAIT.observe(started - submitted)
        stats.POOL_BUSY_WORKERS.inc()
        try:
            return self._work(method, args)
        finally:
            stats.POOL_BUSY_WORKERS.dec()
            stats.POOL_BUSY_SECONDS.inc(time.monotonic() - started)

    def _work(self, method: str, args: tuple[Any, ...]) -> Any:
        started = time.monotonic()
        try:
            if not self.workers:
                return getattr(self.codec, method)(*args)
            return self._run_in_process(method, args)
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            # A panic inside the Rust library is no Exception: it would end tasks without anybody hearing of it.
            raise RuntimeError(f"the tokenizer failed: {error}") from error
        finally:
            if method.startswith("encode"):
                stats.ENCODE_TIME.observe(time.monotonic() - started)

    def _run_in_process(self, method: str, args: tuple[Any, ...]) -> Any:
        # There are as many workers as threads: one is always idle.
        worker = self._idle.get_nowait()
        try:
            try:
                return worker.call(method, args)
            except WorkerDiedError as error:
                stats.POOL_WORKER_DEATHS.inc()
                logger.warning("%s; its job is tried once more by a new one", error)
                return worker.call(method, args)
        finally:
            self._idle.put(worker)
