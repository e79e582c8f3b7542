"""Renders chat templates of requests in separate processes.

A template is a program. Jinja's sandbox keeps it from the machine, but not from using up time and memory, and one long
operation, such as `10 ** (10 ** 9)` or `'a' * 10 ** 10`, halts every thread of its process. So these templates run in
another process, which may be ended. The model's own template is trusted, and rendered by the workers of the pool.
"""

import asyncio
import queue
import resource
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc

from pagewire.process.worker_process import WorkerDiedError, WorkerProcess, WorkerTooSlowError
from pagewire.services.tokenizer.templates.chat import Chat, ChatError, Fit, TemplateError, as_they_are, render_chat
from pagewire.wire.rpc import RpcError

# Seconds for one template; a model's takes less than a millisecond.
TIMEOUT_S = 5.0
# The memory of a process in addition to its memory before the first template.
MEMORY_BYTES = 512 * 1024 * 1024
# Limits of a rendered prompt, and of the error of a template.
MAX_CHARS = 16 * 1024 * 1024
MAX_ERROR_CHARS = 1000
# The number of processes, which start on demand, and of requests that may wait for one.
SIZE = 2
MAX_WAITING = 64
_START_TIMEOUT_S = 60.0


class Renderer:
    """Renders templates in such a process."""

    def __init__(self, special_tokens: Mapping[str, str], memory_bytes: int, fit: Fit) -> None:
        self._special_tokens = special_tokens
        self._fit = fit
        with suppress(OSError, ValueError):  # where the system has no such limit
            statm = Path("/proc/self/statm").read_text().split()
            most = int(statm[0]) * resource.getpagesize() + memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def begin(self) -> None:
        """Does nothing. Its answer shows that the process is ready."""

    def render(self, chat: Chat, image_token: str) -> str:
        """Raises ChatError."""
        try:
            text = render_chat(chat, None, self._special_tokens, image_token, self._fit)
        except ChatError as error:
            raise type(error)(_short(str(error))) from None
        if len(text) > MAX_CHARS:
            raise TemplateError(f"the chat template rendered {len(text)} characters; at most {MAX_CHARS} are possible")
        return text


class RequestTemplates:
    """Renders the templates of requests, a few at a time."""

    def __init__(
        self,
        special_tokens: Mapping[str, str],
        timeout: float = TIMEOUT_S,
        memory_bytes: int = MEMORY_BYTES,
        fit: Fit = as_they_are,
    ) -> None:
        """timeout: seconds for one template. memory_bytes: limit of its memory."""
        self._make = partial(Renderer, special_tokens, memory_bytes, fit)
        self._timeout = timeout
        self._memory_bytes = memory_bytes
        self._processes: list[WorkerProcess] = []
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        # Each thread has a process while it renders.
        self._threads = ThreadPoolExecutor(SIZE, "chat template")
        self._num_waiting = 0

    async def render(self, chat: Chat, image_token: str) -> str:
        """Returns the prompt text. Raises ChatError, or RpcError (RESOURCE_EXHAUSTED) if too many wait."""
        if self._num_waiting >= MAX_WAITING:
            message = f"{self._num_waiting} chat templates of requests wait to be rendered; try again later"
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._render, chat, image_token)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _render(self, chat: Chat, image_token: str) -> str:
        process = self._take()
        try:
            process.call("begin", (), _START_TIMEOUT_S)
            text: str = process.call("render", (chat, image_token), self._timeout)
            return text
        except WorkerTooSlowError:
            raise TemplateError(f"the chat template was not rendered within {self._timeout:g} seconds") from None
        except WorkerDiedError:
            most = self._memory_bytes // 2**20
            raise TemplateError(
                f"the chat template crashed its process, or needs more than {most} MiB of memory"
            ) from None
        finally:
            self._idle.put(process)

    def _take(self) -> WorkerProcess:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            process = WorkerProcess(self._make, "renderer of chat templates")
            self._processes.append(process)
            return process


def _short(message: str) -> str:
    return message if len(message) <= MAX_ERROR_CHARS else f"{message[:MAX_ERROR_CHARS]}…"
