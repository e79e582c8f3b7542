"""One streamed request and its measurements."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from pagewire.tools.bench.config import ServerFlags
from pagewire.tools.bench.http import Connection, HttpError

# Statuses after which the same request may succeed later.
_LATER = (429, 503)


@dataclass
class Record:
    """The measurements of a request. Times are in seconds; start is that of the last attempt, by time.perf_counter().

    retries: refused attempts before it. waited: from the first to the last attempt. ttft: from the written request to
    the first chunk with text (or the end). tpot: from the first to the last such chunk, per output token after the
    first. itl: gaps between such chunks.
    """

    start: float
    end: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    itl: list[float] = field(default_factory=list)
    chunks: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    usage_reported: bool = False
    finish_reason: str | None = None
    error: str | None = None
    retries: int = 0
    waited: float = 0.0


def body(config: ServerFlags, model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    chat = config.endpoint.endswith("/chat/completions")
    request: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": config.temperature,
        "top_p": 1.0,  # as temperature, not by the model's defaults, which servers read differently
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    if config.ignore_eos:
        request["ignore_eos"] = True
    return request


async def send(
    connection: Connection, endpoint: str, request: dict[str, Any], timeout: float, max_retries: int = 0
) -> Record:
    """Sends a request. Errors of the server or the network are in the record's error, never raised. timeout: seconds
    for all attempts together."""
    record = Record(start=time.perf_counter())
    try:
        async with asyncio.timeout(timeout):
            await _persist(connection, endpoint, request, record, max_retries)
    except TimeoutError:
        record.error = f"no end within {timeout:g} s"
    except asyncio.IncompleteReadError:
        record.error = "the server closed the connection"
    except (HttpError, OSError, ValueError, asyncio.LimitOverrunError) as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
    record.end = time.perf_counter()
    if record.error is not None:
        connection.close()
    if record.error is None and record.ttft is None:
        record.error = "no output"
    return record


async def _persist(
    connection: Connection, endpoint: str, request: dict[str, Any], record: Record, max_retries: int
) -> None:
    first_start = record.start
    while True:
        try:
            await _stream(connection, endpoint, request, record)
            return
        except HttpError as error:
            if error.status not in _LATER or record.retries == max_retries:
                raise
            delay = 2.0**record.retries if error.retry_after is None else error.retry_after
        connection.close()
        await asyncio.sleep(delay)
        record.retries += 1
        record.start = time.perf_counter()
        record.waited = record.start - first_start


async def _stream(connection: Connection, endpoint: str, request: dict[str, Any], record: Record) -> None:
    first = last = 0.0
    async for event in connection.events(endpoint, request):
        now = time.perf_counter()
        if event.get("error"):
            record.error = str(event["error"])[:200]
            return
        if usage := event.get("usage"):
            record.usage_reported = True
            record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices") or ():
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            if not _text(choice) and (record.ttft is not None or not choice.get("finish_reason")):
                continue
            if record.ttft is None:
                first, record.ttft = now, now - record.start
            else:
                record.itl.append(now - last)
            last = now
            record.chunks += 1
    if not record.usage_reported:
        record.completion_tokens = record.chunks
    if record.completion_tokens > 1:
        record.tpot = (last - first) / (record.completion_tokens - 1)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
