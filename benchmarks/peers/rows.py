"""The rows of the table as data: what is asked of each contestant, and the figure that comes of its answer."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.engines.worker import Times, Work
from pagewire.tools.bench import spec
from pagewire.tools.bench.prompts import RandomWords

RATE, FIRST, REQUESTS = "tok/s", "ms", "requests/s"
# What a contestant must be able to do.
PREFIXES, HTTP = "prefixes", "http"
TEXTS_PER_KIND = 2
NUM_ADAPTERS = 8


@dataclass(frozen=True)
class Row:
    """A load of `count` requests, `concurrency` at once, and the kind of its figure.

    repeats: as many loads a round, of which the median counts. prefix_len: tokens that all prompts begin with, which
    are known before. texts: a kind of the texts of `pagewire bench spec` instead of random words.
    """

    key: str
    title: str
    short_title: str
    figure: str = RATE
    input_len: int = 128
    output_len: int = 128
    count: int = 1
    concurrency: int = 1
    repeats: int = 1
    prefix_len: int = 0
    texts: str = ""
    needs: str = ""

    @property
    def more_is_better(self) -> bool:
        return self.figure != FIRST

    @property
    def is_limited(self) -> bool:
        """Returns whether a load that takes too long is given up, since its tokens then bound its figure."""
        return self.figure == RATE and self.count == self.concurrency

    def prompts(self, words: RandomWords, chat: Callable[[str], str]) -> tuple[list[str], list[str]]:
        """Returns what is sent first, unmeasured, and the measured prompts. chat: makes a prompt of a message."""
        if self.texts:
            texts = json.loads(Path(spec.PROMPTS).read_text())[self.texts][:TEXTS_PER_KIND]
            return [], [chat(text) for text in texts]
        if self.prefix_len:
            (prefix,) = words.prompts(self.prefix_len, 1)
            known, *others = [f"{prefix} {tail}" for tail in words.prompts(self.input_len, 1 + self.count)]
            return [known], others
        return [], words.prompts(self.input_len, self.count)

    def work(self, prompts: Sequence[str], limit_s: float | None = None) -> Work:
        return Work(prompts, self.output_len, self.concurrency, exact=not self.texts, limit_s=limit_s)

    def value(self, requests: Sequence[Times]) -> float:
        if self.figure == FIRST:
            return 1e3 * statistics.median(one.first - one.start for one in requests)
        count = sum(one.num_tokens for one in requests) if self.figure == RATE else len(requests)
        return count / seconds(requests)


def seconds(requests: Sequence[Times]) -> float:
    return max(one.last for one in requests) - min(one.start for one in requests)


def _streams(count: int, kind: str = "streams") -> Row:
    many = "stream" if count == 1 else "streams"
    title = f"LoRA: {NUM_ADAPTERS} adapters, {count} {many}" if kind == "lora" else f"{count} {many}"
    return Row(f"{kind}-{count}", f"{title}, output tok/s", f"{count}", count=count, concurrency=count)


ROWS = {
    row.key: row
    for row in (
        *(_streams(count) for count in (1, 8, 32, 64)),
        Row("first-2048", "first token of a prompt of 2,048, ms", "2,048", FIRST, 2048, 1),
        Row("first-8x128", "first token of 8 prompts of 128 at once, ms", "8 × 128", FIRST, 128, 1, 8, 8, repeats=2),
        Row(
            "prefix",
            "first token of 1,024 cached + 64 new, ms",
            "cached",
            FIRST,
            64,
            1,
            8,
            prefix_len=1024,
            needs=PREFIXES,
        ),
        Row("short", "requests/s, 4 tokens in, 1 out, 32 in flight", "short", REQUESTS, 4, 1, 288, 32, needs=HTTP),
        *(_streams(count, "lora") for count in (8, 32)),
        *(
            Row(kind, f"{kind}, 1 stream, output tok/s", kind, count=TEXTS_PER_KIND, texts=kind)
            for kind in ("chat", "code", "quotes")
        ),
    )
}


@dataclass(frozen=True)
class Comparison:
    """A table: one of ours beside others, by key.

    asked: for each row, what ours divided by the best of the others should be, at least, or at most if less is better.
    own: another one of ours, with which ours is compared for `asked` instead.
    """

    title: str
    ours: str
    others: tuple[str, ...]
    asked: dict[str, float]
    own: str = ""


PEERS = ("openvino", "llamacpp", "vllm")
FOUR_BITS = ("llamacpp-q4_0", "llamacpp-q4_1")
# llama.cpp's products of many rows are slower in Q4_1 than in Q4_0; this row shows it.
FEW_ROWS = {"llamacpp-q4_1": {"streams-8"}}
COMPARISONS = (
    Comparison(
        "bf16",
        "pagewire-bf16",
        PEERS,
        dict.fromkeys(("streams-1", "streams-8", "streams-32", "streams-64"), 1.2)
        | {"first-2048": 0.8, "first-8x128": 0.9, "prefix": 0.75, "short": 2.0},
    ),
    Comparison(
        "4 bits",
        "pagewire",
        FOUR_BITS,
        dict.fromkeys(("streams-8", "streams-32", "streams-64"), 1.1),
        own="pagewire-bf16",
    ),
    Comparison("bf16, adapters of rank 16", "pagewire-lora", ("vllm-lora",), {"lora-8": 1.2, "lora-32": 1.2}),
    Comparison(
        "texts, our default flags",
        "pagewire-default",
        (*PEERS, "llamacpp-q4_0"),
        {"chat": 1.5, "code": 2.5, "quotes": 2.5},
    ),
)


def measured_by(key: str) -> set[str]:
    """Returns the rows that a contestant is measured in."""
    rows = {row for one in COMPARISONS if key in (one.ours, one.own, *one.others) for row in one.asked}
    return rows & FEW_ROWS.get(key, rows)
