"""The lines of a batch's input, in OpenAI's format: {"custom_id", "method": "POST", "url", "body"}."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pagewire.files.json_counts import TooManyValues, check_counts, json_fault
from pagewire.wire.model_names import not_served

# The values of `url`, if the server has the endpoint.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/v1/classify",
    "/classify",
    "/v1/pooling",
    "/pooling",
)
# Parameters of a body that would deliver the answer elsewhere.
_REFUSED = {"stream": "a line of a batch cannot be streamed", "background": "a line of a batch runs in the background"}
MAX_ERRORS = 100
# HTTP refuses larger bodies, too.
MAX_LINE_BYTES = 32 * 1024 * 1024
_READ_AHEAD_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Line:
    """One request."""

    number: int  # in the file, from 1
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def model(self) -> str | None:
        model = self.body.get("model")
        return model if isinstance(model, str) else None


class LineError(Exception):
    """A line that is not a request."""

    def __init__(self, number: int | None, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.number = number
        self.code = code
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message if self.number is None else f"line {self.number}: {self.message}"


@dataclass
class Checked:
    """The result of checking a file. errors: the first MAX_ERRORS, in the order of lines."""

    num_requests: int = 0
    errors: list[LineError] = field(default_factory=list)
    models: dict[str, int] = field(default_factory=dict)  # name -> the first line with it


def check(path: Path, endpoints: Collection[str], max_requests: int | None = None) -> Checked:
    """Reads and checks the whole file. Raises OSError."""
    checked, custom_ids = Checked(), set[str]()
    with path.open("rb") as file:
        for number, raw in _numbered(file):
            if checked.num_requests == max_requests:
                message = f"a batch may have {max_requests} requests: divide it into several"
                checked.errors.append(LineError(number, "too_many_requests", message))
                break
            checked.num_requests += 1
            try:
                line = _parse(number, raw, endpoints)
                if line.custom_id in custom_ids:
                    message = f"the custom_id {line.custom_id!r} occurs in an earlier line: give each line its own"
                    raise LineError(number, "duplicate_custom_id", message, "custom_id")
            except LineError as error:
                checked.errors.append(error)
                if len(checked.errors) == MAX_ERRORS:
                    break
                continue
            custom_ids.add(line.custom_id)
            if line.model is not None:
                checked.models.setdefault(line.model, number)
    if not checked.num_requests:
        checked.errors.append(LineError(None, "empty_file", "the file holds no request"))
    return checked


def check_models(checked: Checked, served: Collection[str]) -> None:
    """Adds an error for each named model that is not served."""
    for model, number in checked.models.items():
        if model not in served:
            message = not_served(model, served)
            checked.errors.append(LineError(number, "model_not_found", message, "body.model"))
    checked.errors.sort(key=lambda error: error.number or 0)


async def read(path: Path, endpoints: Collection[str], done: Collection[str]) -> AsyncIterator[Line]:
    """Yields the requests of a checked file, without those that are done. Raises OSError."""
    with await asyncio.to_thread(path.open, "rb") as file:
        numbered = _numbered(file)
        while lines := await asyncio.to_thread(_some, numbered, endpoints):
            for line in lines:
                if line.custom_id not in done:
                    yield line


def _some(numbered: Iterator[tuple[int, bytes]], endpoints: Collection[str]) -> list[Line]:
    lines, size = [], 0
    for number, raw in numbered:
        lines.append(_parse(number, raw, endpoints))
        size += len(raw)
        if size >= _READ_AHEAD_BYTES:
            break
    return lines


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank. A line that is too long is cut one byte beyond the limit."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if raw.strip():
            yield number, raw
        while not raw.endswith(b"\n") and raw:
            raw = file.readline(_READ_AHEAD_BYTES)


def _parse(number: int, raw: bytes, endpoints: Collection[str]) -> Line:
    if len(raw) > MAX_LINE_BYTES:
        raise LineError(number, "line_too_long", f"longer than {MAX_LINE_BYTES} bytes")
    try:
        check_counts(raw)
        value = json.loads(raw)
    except TooManyValues as error:
        raise LineError(number, "body_too_complex", f"the line has {error}", "body") from None
    except (ValueError, RecursionError) as error:  # including text that is not UTF-8
        raise LineError(number, "invalid_json_line", f"not valid JSON: {json_fault(error)}") from None
    if not isinstance(value, dict):
        raise LineError(number, "invalid_json_line", "not a JSON object")
    for name, kind, what in (("custom_id", str, "text"), ("url", str, "text"), ("body", dict, "an object")):
        if value.get(name) in (None, ""):
            raise LineError(number, "missing_required_parameter", f"{name} is missing", name)
        if not isinstance(value[name], kind):
            raise LineError(number, "invalid_type", f"{name} must be {what}", name)
    line = Line(number, value["custom_id"], value["url"], value["body"])
    if value.get("method", "POST") != "POST":
        raise LineError(number, "invalid_method", f"method must be POST, not {value['method']!r}", "method")
    if line.url not in endpoints:
        expected = " or ".join(endpoints) if len(endpoints) < 3 else f"one of {', '.join(endpoints)}"
        raise LineError(number, "invalid_url", f"url must be {expected}, not {line.url!r}", "url")
    for name, reason in _REFUSED.items():
        if line.body.get(name):
            raise LineError(number, "invalid_request", f"{name}: {reason}", f"body.{name}")
    return line
