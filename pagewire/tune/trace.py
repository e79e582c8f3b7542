"""The requests that flags are measured with."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.errors import StartupError

_NUM_REQUESTS, _MOST_TOKENS = 24, 64
_WORDS = (Path(__file__).parents[1] / "bench" / "words.txt").read_text().split()


@dataclass(frozen=True)
class Request:
    """at: seconds since the first; None: as soon as another has ended."""

    prompt: str
    max_tokens: int
    at: float | None = None


def read(path: str | None) -> list[Request]:
    """Raises StartupError for a file that is none, or has fewer than two requests."""
    if path is None:
        return _built_in()
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        requests = [_request(row) for row in rows]
    except OSError as error:
        raise StartupError(f"--trace {path}: {error.strerror}") from error
    except ValueError as error:
        why = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise StartupError(
            f'--trace {path}: expected JSON lines {{"prompt": "...", "max_tokens": N, "at": SECONDS}} ({why})'
        ) from error
    if len(requests) < 2:
        raise StartupError(f"--trace {path}: at least two requests are needed, better some dozens")
    if len({request.at is None for request in requests}) > 1:
        raise StartupError(f"--trace {path}: some requests have times (at) and some have none; give all or none")
    return sorted(requests, key=lambda request: request.at or 0.0)


def _request(row: object) -> Request:
    """Raises ValueError."""
    if isinstance(row, dict):
        prompt, max_tokens, at = row.get("prompt"), row.get("max_tokens", _MOST_TOKENS), row.get("at")
        is_time = at is None or (type(at) in (int, float) and 0 <= at < math.inf)
        if isinstance(prompt, str) and type(max_tokens) is int and max_tokens >= 1 and is_time:
            return Request(prompt, max_tokens, None if at is None else float(at))
    raise ValueError(f"in {row!s:.100}")


def _built_in() -> list[Request]:
    draw = random.Random(0)
    system = " ".join(draw.choices(_WORDS, k=200))

    def prompt(index: int) -> str:
        own = " ".join(draw.choices(_WORDS, k=draw.randint(100, 600)))
        return f"{system} {own}" if index % 2 else own

    return [Request(prompt(index), draw.randint(16, _MOST_TOKENS)) for index in range(_NUM_REQUESTS)]


def mean_output(requests: Sequence[Request]) -> float:
    return sum(request.max_tokens for request in requests) / len(requests)
