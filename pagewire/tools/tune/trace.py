"""The requests for measurements."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.config import json_object
from pagewire.errors import StartupError

_NUM_REQUESTS, _MOST_TOKENS = 24, 64
_EXPECTED = 'expected {"prompt": "...", "max_tokens": N, "at": SECONDS}'
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")  # of surrogates, which are not text
_WORDS = (Path(__file__).parents[1] / "bench" / "words.txt").read_text().split()


@dataclass(frozen=True)
class Request:
    """One request of a trace. at: seconds since the first; None: as soon as another has ended."""

    prompt: str
    max_tokens: int
    at: float | None = None


def read(path: str | None) -> list[Request]:
    """Reads a trace. Raises StartupError for an invalid file, or one with fewer than two requests."""
    if path is None:
        return _built_in()
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise StartupError(f"--trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"--trace {path}: it is not text in UTF-8") from error
    requests = [_request(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if len(requests) < 2:
        raise StartupError(f"--trace {path}: at least two requests are needed, better some dozens")
    if len({request.at is None for request in requests}) > 1:
        raise StartupError(f"--trace {path}: some requests have times (at) and some do not; give all or none")
    return sorted(requests, key=lambda request: request.at or 0.0)


def _request(line: str, where: str) -> Request:
    """Raises StartupError."""
    try:
        row = json_object.loads(line)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"--trace {where}: not JSON: {error}; {_EXPECTED}") from error
    if not isinstance(row, dict):
        raise StartupError(f"--trace {where}: {_EXPECTED}")
    prompt, max_tokens, at = row.get("prompt"), row.get("max_tokens", _MOST_TOKENS), row.get("at")
    right = {
        "prompt": isinstance(prompt, str) and bool(prompt) and not _HALF_PAIR.search(prompt),
        "max_tokens": type(max_tokens) is int and max_tokens >= 1,
        "at": at is None or (type(at) in (int, float) and 0 <= at < math.inf),
    }
    if wrong := [name for name in right if not right[name]]:
        raise StartupError(f"--trace {where}: {wrong[0]} is {row.get(wrong[0])!r:.80}; {_EXPECTED}")
    return Request(str(prompt), max_tokens, None if at is None else float(at))


def seconds(requests: Sequence[Request]) -> float:
    """Returns the seconds from the first to the last request of a trace with times."""
    return max((request.at or 0.0 for request in requests), default=0.0)


def _built_in() -> list[Request]:
    draw = random.Random(0)
    system = " ".join(draw.choices(_WORDS, k=200))

    def prompt(index: int) -> str:
        own = " ".join(draw.choices(_WORDS, k=draw.randint(100, 600)))
        return f"{system} {own}" if index % 2 else own

    return [Request(prompt(index), draw.randint(16, _MOST_TOKENS)) for index in range(_NUM_REQUESTS)]


def mean_output(requests: Sequence[Request]) -> float:
    return sum(request.max_tokens for request in requests) / len(requests)
