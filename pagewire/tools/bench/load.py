"""Requests to a server, in a closed or an open loop."""

import asyncio
import os
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pagewire.errors import StartupError
from pagewire.progress_line import ProgressLine
from pagewire.tools.bench.config import BenchConfig, ServerFlags
from pagewire.tools.bench.http import Connection, HttpError
from pagewire.tools.bench.request import Record, body, send
from pagewire.tools.client_config import KEY_HINT
from pagewire.wire.tls import failed_handshake

_NO_ROUTE = (404, 405, 501)


@dataclass(frozen=True)
class ServedModel:
    """A model as the server lists it. max_model_len: prompt plus output, tokens; None if the server does not list
    it."""

    name: str
    max_model_len: int | None


def connect(config: ServerFlags) -> Connection:
    key = config.api_key or os.environ.get("PAGEWIRE_API_KEY", "").partition(",")[0] or os.environ.get("OPENAI_API_KEY")
    try:
        # Either with /v1, as OpenAI's clients write it, or without.
        return Connection(
            config.base_url.rstrip("/").removesuffix("/v1"),
            {"Authorization": f"Bearer {key}"} if key else {},
            config.tls_files,
        )
    except ValueError as error:
        raise StartupError(f"--base-url: {error}") from error


async def served_model(connection: Connection, config: ServerFlags) -> ServedModel:
    """Returns the model that --model names, or the first that the server lists. Raises StartupError.

    If the server lists none, or has no such route, a request with the name in --model is sent.
    """
    listed: dict[str, object] = {}
    try:
        models = (await connection.json("GET", "/v1/models"))["data"]
        listed = {str(model["id"]): model.get("max_model_len") for model in models}
        name = config.model or next(iter(listed))
    except (OSError, HttpError, asyncio.IncompleteReadError) as error:
        if not (isinstance(error, HttpError) and error.status in _NO_ROUTE):
            hint = failed_handshake(str(error)) or "is the server running?"
            if isinstance(error, HttpError):  # it is
                hint = KEY_HINT if error.status == 401 else "see its log"
            raise StartupError(f"no answer from {config.base_url} ({error}): {hint}") from error
        name = _unlisted(config, error)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        name = _unlisted(config, error)
    max_model_len = listed.get(name)
    return ServedModel(name, max_model_len if isinstance(max_model_len, int) else None)


def _unlisted(config: ServerFlags, error: Exception) -> str:
    """Returns the name in --model. Raises StartupError without one."""
    if not config.model:
        raise StartupError(f"{config.base_url}/v1/models lists no model: name one with --model") from error
    return config.model


async def must_answer(connection: Connection, config: ServerFlags, model: str, prompt: str, max_tokens: int) -> Record:
    record = await send(connection, config.endpoint, body(config, model, prompt, max_tokens), config.timeout)
    if record.error is not None:
        raise StartupError(f"a request before the measurement failed: {record.error}")
    return record


async def count_tokens(connection: Connection, config: ServerFlags, model: str, prompt: str) -> int:
    """Returns the number of tokens as the server counts them, or of words if it reports none."""
    record = await must_answer(connection, config, model, prompt, 1)
    return record.prompt_tokens if record.prompt_tokens is not None else len(prompt.split())


async def run(config: BenchConfig, requests: list[dict[str, Any]]) -> list[Record]:
    """Sends all requests. Closed loop: `concurrency` are always in flight. Open loop: they start at `request_rate`,
    with at most `concurrency` in flight."""
    records: list[Record] = []
    idle: list[Connection] = []
    slots = asyncio.Semaphore(config.concurrency or len(requests))

    progress = ProgressLine(len(requests), "requests")

    async def one(request: dict[str, Any]) -> None:
        connection = idle.pop() if idle else connect(config)
        records.append(await send(connection, config.endpoint, request, config.timeout, config.max_retries))
        progress.advance()
        idle.append(connection)
        slots.release()

    started = time.perf_counter()
    with progress:
        async with asyncio.TaskGroup() as tasks:
            for start, request in zip(starts(config), requests, strict=False):
                await asyncio.sleep(max(0.0, started + start - time.perf_counter()))
                await slots.acquire()
                tasks.create_task(one(request))
    for connection in idle:
        connection.close()
    return sorted(records, key=lambda record: record.start)


def starts(config: BenchConfig) -> Iterator[float]:
    """Yields seconds after the first start; gaps are gamma distributed with mean 1/request_rate, or 0 in a closed
    loop."""
    draw = random.Random(config.seed)
    start, shape = 0.0, config.burstiness
    while True:
        yield start
        if config.request_rate:
            start += draw.gammavariate(shape, 1 / (config.request_rate * shape))


def cpu_seconds() -> float:
    """Returns the processor time of this process, the load generator, so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
