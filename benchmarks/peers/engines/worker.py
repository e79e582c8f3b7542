"""Runs an engine for `python -m benchmarks.peers`, with a JSON object per line on stdin and stdout.

The first line has the settings of the engine and is answered by {"ready": true}. Every other line is a `Work`, answered
by {"requests": [[start, first token, last token, tokens], ...]} in seconds, or by {"unfinished": true}. An engine that
fails answers {"error": "..."} and ends. Needs only the standard library, since it runs in the environments of others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Work:
    """Requests to run, greedily, `concurrency` at once.

    exact: output_len tokens for each; otherwise an end token ends it earlier. limit_s: after these seconds the work is
    given up; None: never.
    """

    prompts: Sequence[str]
    output_len: int
    concurrency: int = 1
    exact: bool = True
    limit_s: float | None = None


class Times(NamedTuple):
    """The times of a request by `time.perf_counter`, and its number of output tokens."""

    start: float
    first: float
    last: float
    num_tokens: int


class Unfinished(Exception):
    """Raised if the work takes longer than limit_s."""


class Engine(Protocol):
    def run(self, work: Work) -> list[Times]:
        """Runs the work. Raises Unfinished."""
        ...


class BatchEngine(Protocol):
    def generate(self, work: Work, deadline: float) -> list[Times]:
        """Runs all prompts at once. Raises Unfinished when `time.perf_counter` reaches the deadline."""
        ...


@dataclass(frozen=True)
class InBatches:
    """Runs work on an engine that takes all prompts at once: batch after batch."""

    engine: BatchEngine

    def run(self, work: Work) -> list[Times]:
        deadline = time.perf_counter() + (float("inf") if work.limit_s is None else work.limit_s)
        found = []
        for begin in range(0, len(work.prompts), work.concurrency):
            prompts = work.prompts[begin : begin + work.concurrency]
            batch = Work(prompts, work.output_len, work.concurrency, work.exact)
            found += self.engine.generate(batch, deadline)
        return found


def main(load: Callable[[Mapping[str, Any]], Engine]) -> int:
    """Returns 0 when stdin ends, 1 after an error."""
    # Libraries print to stdout; what they print goes to stderr.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(content: Mapping[str, Any]) -> None:
            print(json.dumps(content), file=answers, flush=True)

        try:
            engine = load(json.loads(sys.stdin.readline()))
            answer({"ready": True})
            for line in sys.stdin:
                try:
                    answer({"requests": engine.run(Work(**json.loads(line)))})
                except Unfinished:
                    answer({"unfinished": True})
        except Exception as error:  # of a library: any kind
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
    return 0
