"""Server-sent events as OpenAI's clients read them."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from pagewire.gateway.errors import ApiError

DONE = "data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Reverse proxies that buffer would turn a stream into one late lump.
    (b"x-accel-buffering", b"no"),
]

# One encoder for all: json.dumps with options builds a new one per call, which costs more than the encoding.
dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def error_event(error: ApiError) -> str:
    """The last event of a response that failed after it began."""
    return f"data: {dumps(error.body())}\n\n{DONE}"


class Usage(Protocol):
    """The token counts of an answer up to now; adding them up takes time."""

    def members(self) -> Mapping[str, Any]: ...


class ChunkWriter:
    """The events of one response. What all of them share is formatted once."""

    def __init__(self, head: Mapping[str, Any], *, include_usage: bool, continuous_usage: bool) -> None:
        """include_usage: one more event with the usage at the end, and `usage: null` in the others."""
        self._head = f"data: {dumps(head)[:-1]},"
        self._end = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def chunk(self, choice: str, usage: Usage, extra: str = "") -> str:
        """choice: one choice as JSON; usage: up to here; extra: further members of the event, `"name":value,`."""
        end = f'],"usage":{dumps(usage.members())}}}\n\n' if self._continuous_usage else self._end
        return f'{self._head}{extra}"choices":[{choice}{end}'

    def end(self, usage: Usage) -> str:
        last = f'{self._head}"choices":[],"usage":{dumps(usage.members())}}}\n\n' if self._include_usage else ""
        return last + DONE
