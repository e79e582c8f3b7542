"""The tokenizer pool: workers render and encode prompts instead of the event loop, which serves all requests.

Workers are threads by default: the Rust tokenizer releases the interpreter lock while it encodes. Processes are for
chat templates with heavy Python work, and for tokenizers that might crash. Either way each worker has one thread, which
talks to the process if there is one. Short texts are the exception: handing one to a thread takes longer than encoding
it.
"""

import asyncio
import logging
import queue
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc

from pagewire.process.memory_return import return_memory_after
from pagewire.process.process import usable_cores
from pagewire.process.worker_process import WorkerDiedError, WorkerProcess, WorkerTooSlowError
from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.pool.codec import Codec, CodecSource
from pagewire.services.tokenizer.pool.image_reader import ImageReader, NoImages
from pagewire.services.tokenizer.pool.input_encoding import Cuts, EncodedInput
from pagewire.services.tokenizer.pool.text_limit import Room
from pagewire.services.tokenizer.pool.timed_threads import TimedThreads
from pagewire.services.tokenizer.templates.chat import Chat, ChatError
from pagewire.services.tokenizer.templates.request_templates import RequestTemplates
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

MAX_DEFAULT_SIZE = 8
# In characters, which take at most 100 microseconds. A thread takes 70 more, and waits for a core while all are busy.
SHORT_TEXT = 256
# The limit of all texts that wait or are being encoded, in characters. A single one may be longer.
MAX_QUEUED_CHARS = 64 * 1024 * 1024
# In characters. Encoding takes a hundred times the memory, so texts of this size are encoded one at a time.
LARGE_TEXT = 1024 * 1024


class TokenizerPool:
    """`size` workers. Calls wait in order of arrival while all are busy."""

    def __init__(
        self,
        source: CodecSource,
        *,
        size: int | None = None,
        kind: str = "thread",
        max_queued: int = 4096,
        timeout: float = 30.0,
    ) -> None:
        """Loads the tokenizer, on the caller's thread. kind: "thread" or "process"; processes load it too.

        max_queued: the most calls that may wait when a request is admitted. timeout: seconds of a call's work,
        including the start of a new process.

        Raises ValueError if the tokenizer cannot be loaded, or size is below 1.
        """
        self.size = min(usable_cores(), MAX_DEFAULT_SIZE) if size is None else size
        if self.size < 1:
            raise ValueError(f"--tokenizer-pool-size is {size}; it must be at least 1")
        self.codec = Codec(source)
        self.images: ImageReader = NoImages("this model reads no images")
        self.workers = [WorkerProcess(partial(Codec, source)) for _ in range(self.size)] if kind == "process" else []
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in self.workers:
            self._idle.put(worker)
        self._threads = TimedThreads(self.size, "tokenizer")
        special_tokens = self.codec.tokenizer.special_tokens
        self._request_templates = (
            RequestTemplates(special_tokens, fit=source.fit) if source.trust_request_chat_template else None
        )
        self._max_queued = max_queued
        self._timeout = timeout
        self._num_calls = 0
        self._num_chars = 0  # of their texts
        self._large = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None  # while there are calls
        self._is_closed = False
        stats.POOL_WORKERS.set(self.size)

    def check_room(self) -> None:
        """Checks whether a request can be admitted; all of its calls are accepted then.

        Raises RpcError (RESOURCE_EXHAUSTED).
        """
        num_waiting = self._num_calls - self.size
        if num_waiting >= self._max_queued or self._num_chars > MAX_QUEUED_CHARS:
            stats.POOL_REFUSALS.inc()
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{max(0, num_waiting)} texts of {self._num_chars} characters wait to be encoded; at most "
                f"{self._max_queued} (--max-queued-prompts) of {MAX_QUEUED_CHARS} may wait; try again later",
            )

    async def encode_text(self, text: str, *, add_special_tokens: bool, room: Room | None = None) -> list[int]:
        """Returns the tokens of a text. Raises TextTooLong if there are more than the room has."""
        return_memory_after(len(text))
        self.codec.limit.check(text, room)
        return await self._call("encode_text", len(text), text, add_special_tokens, room)

    async def encode_infill(
        self, prefix: str, suffix: str, *, add_special_tokens: bool, room: Room | None = None
    ) -> list[int]:
        """Returns the tokens of a prompt in which the middle is filled in. Raises TextTooLong."""
        size = len(prefix) + len(suffix)
        return_memory_after(size)
        for text in (prefix, suffix):
            self.codec.limit.check(text, room)
        return await self._call("encode_infill", size, prefix, suffix, add_special_tokens, room)

    def encodes_at_once(self, text: str) -> bool:
        """Returns whether `encode_at_once` is allowed: with process workers, a crash must not end this process."""
        return len(text) <= SHORT_TEXT and not self.workers

    def encode_at_once(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of a short text, encoded on the caller's thread."""
        token_ids: list[int] = self._work("encode_text", (text, add_special_tokens))
        return token_ids

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token sequences that write one of the words."""
        return await self._call("encode_words", sum(map(len, words)), words)

    async def encode_inputs(
        self, texts: Sequence[tuple[str, str | None]], *, add_special_tokens: bool, cuts: Cuts
    ) -> list[EncodedInput]:
        """Returns the tokens of texts or pairs. Raises ValueError, TextTooLong for a text that is too long."""
        size = sum(len(text) + len(pair or "") for text, pair in texts)
        return await self._call("encode_inputs", size, texts, add_special_tokens, cuts)

    async def encode_chat(
        self,
        chat: Chat,
        *,
        add_special_tokens: bool,
        image_texts: Sequence[str] = (),
        room: Room | None = None,
    ) -> list[int]:
        """Renders and encodes a chat. image_texts: stand for its images. Raises ChatError or TextTooLong."""
        image_token = self.images.image_token
        if chat.chat_template:
            if self._request_templates is None:
                raise ChatError(
                    "chat_template is not accepted in requests; start the server with --trust-request-chat-template"
                )
            text = await self._request_templates.render(chat, image_token)
            given = (add_special_tokens, image_token, image_texts, room)
            return await self._call("encode_rendered", len(text), text, *given)
        args = (chat, add_special_tokens, image_token, image_texts, room)
        return await self._call("encode_chat", chat.num_chars, *args)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._call("decode", len(token_ids), token_ids, skip_special_tokens)

    async def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        return await self._call("vocabulary_entries", len(token_ids), token_ids)

    def close(self) -> None:
        """Drops calls that wait, and gives up those that do not end soon."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._threads.close()
        for worker in self.workers:
            worker.close()
        if self._request_templates is not None:
            self._request_templates.close()
        self.images.close()

    async def _call(self, method: str, num_chars: int, *args: Any) -> Any:
        """num_chars: of the texts among the arguments."""
        self._num_calls += 1
        self._num_chars += num_chars
        try:
            if num_chars <= LARGE_TEXT:
                return await self._submit(method, args)
            async with self._large:
                return await self._submit(method, args)
        finally:
            self._num_calls -= 1
            self._num_chars -= num_chars
            return_memory_after(num_chars)

    async def _submit(self, method: str, args: tuple[Any, ...]) -> Any:
        stats.POOL_QUEUE_LENGTH.inc()
        job = self._threads.submit(partial(self._run, time.monotonic(), method, args))
        # A job that is cancelled while it waits never runs, so it leaves the queue here.
        job.add_done_callback(lambda job: stats.POOL_QUEUE_LENGTH.dec() if job.cancelled() else None)
        if self._timer is None and not self.workers:
            self._timer = asyncio.get_running_loop().call_later(self._timeout / 4, self._give_up_slow)
        return await asyncio.wrap_future(job)

    def _give_up_slow(self) -> None:
        """Gives up slow calls. Threads cannot report them, so the event loop checks while there are calls."""
        self._timer = None
        self._threads.give_up_slow(self._timeout, self._too_slow)
        if self._num_calls:
            self._timer = asyncio.get_running_loop().call_later(self._timeout / 4, self._give_up_slow)

    def _too_slow(self) -> RpcError:
        stats.POOL_GIVEN_UP.inc()
        logger.warning("a text was not encoded within %g seconds; its worker is replaced", self._timeout)
        return invalid(
            f"the prompt was not rendered and encoded within {self._timeout:g} seconds (--prompt-timeout): shorten it, "
            "or correct its chat template if that is slow"
        )

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
            # A panic inside the Rust library is no Exception: it would end tasks without a trace.
            raise RuntimeError(f"the tokenizer failed: {error}") from error
        finally:
            if method.startswith("encode"):
                stats.ENCODE_TIME.observe(time.monotonic() - started)

    def _run_in_process(self, method: str, args: tuple[Any, ...]) -> Any:
        # There are as many workers as threads: one is always idle.
        worker = self._idle.get_nowait()
        try:
            try:
                return worker.call(method, args, self._timeout)
            except WorkerDiedError as error:
                if self._is_closed:
                    raise
                stats.POOL_WORKER_DEATHS.inc()
                logger.warning("%s; a new worker tries its job once more", error)
                return worker.call(method, args, self._timeout)
        except WorkerTooSlowError as error:
            raise self._too_slow() from error
        finally:
            self._idle.put(worker)
