"""Measures what tiers of KV memory save: `python -m benchmarks.curves.turns [--sessions 16] [FLAGS OF serve]`.

Conversations take turns on one server, so that each finds its earlier turns evicted from the KV cache, which holds a
quarter of all of them. The same trace runs on a server without tiers, on one with a directory, and on the latter after
a restart. One row for each: time to the first token of later turns (median, 90th percentile), the part of their prompts
that was not computed, the time of the whole trace, and whether all answers equal those without tiers, which greedy
sampling in fp32 makes certain (`--dtype float32 --quantization none`).
"""

import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx

from benchmarks.serving import server
from pagewire import flags
from pagewire.config import ServeConfig
from pagewire.config.fields import POSITIVE, flag

BLOCK_SIZE = 16
# Common words, about one token each.
WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "that", "on", "with", "as", "it", "by", "at", "from")


@dataclass(frozen=True, kw_only=True)
class TurnsConfig(ServeConfig):
    """The stack, and the conversations."""

    sessions: int = flag(16, "conversations", group="load", valid=POSITIVE)
    turns: int = flag(4, "requests of each", group="load", valid=POSITIVE)
    first_words: int = flag(700, "words of each first prompt", group="load", valid=POSITIVE)
    more_words: int = flag(40, "words that each later turn adds", group="load", valid=POSITIVE)
    answer_len: int = flag(24, "tokens of each answer", group="load", valid=POSITIVE)
    concurrency: int = flag(1, "conversations that ask at the same time", group="load", valid=POSITIVE)


@dataclass(frozen=True)
class Answer:
    """An answer, and how it came."""

    text: str
    first_token: float  # seconds
    num_prompt_tokens: int
    num_cached_tokens: int


def main() -> None:
    config = flags.parse(
        TurnsConfig, sys.argv[1:], prog="python -m benchmarks.curves.turns", description="What tiers of KV memory save."
    )
    longest = config.first_words + config.turns * (config.more_words + config.answer_len)
    num_blocks = max(config.sessions // 4, 2) * longest // BLOCK_SIZE
    config = replace(
        config,
        log_level="warning",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks,
        max_model_len=min(config.max_model_len or num_blocks * BLOCK_SIZE, num_blocks * BLOCK_SIZE),
    )
    print(f"{config.sessions} conversations of up to {longest} words, {num_blocks * BLOCK_SIZE} tokens in the KV cache")
    print(f"{'':>24}{'ttft p50, ms':>14}{'p90':>8}{'not computed':>14}{'trace, s':>10}  answers")
    with tempfile.TemporaryDirectory() as directory:
        with_tier = replace(config, kv_offloading_dir=directory)
        without = run("computed again", config, None)
        run("directory", with_tier, without)
        run("after a restart", with_tier, without)


def run(name: str, config: TurnsConfig, expected: list[list[Answer]] | None) -> list[list[Answer]]:
    """Runs the trace on a server of its own, and prints a row."""
    with server(config) as (_, port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        ask(client, "Hello", 2)
        start = time.perf_counter()
        answers = trace(client, config)
        seconds = time.perf_counter() - start
    # After a restart, first turns are found, too; they are not counted, so that the rows compare the same requests.
    later = [answer for turn in answers[1:] for answer in turn]
    times = sorted(1000 * answer.first_token for answer in later)
    cached = sum(answer.num_cached_tokens for answer in later) / sum(answer.num_prompt_tokens for answer in later)
    p90 = times[int(0.9 * (len(times) - 1))]
    verdict = "" if expected is None else f"  {num_equal(answers, expected)} of {config.sessions * config.turns} equal"
    print(f"{name:>24}{statistics.median(times):>14.0f}{p90:>8.0f}{cached:>14.0%}{seconds:>10.1f}{verdict}", flush=True)
    return answers


def num_equal(answers: list[list[Answer]], expected: list[list[Answer]]) -> int:
    pairs = zip(itertools.chain(*answers), itertools.chain(*expected), strict=True)
    return sum(one.text == other.text for one, other in pairs)


def trace(client: httpx.Client, config: TurnsConfig) -> list[list[Answer]]:
    """Returns the answers of each turn, [turns][sessions]."""
    draw = random.Random(7)
    prompts = [words(draw, config.first_words) for _ in range(config.sessions)]
    turns: list[list[Answer]] = []
    for _ in range(config.turns):
        answers = list(asked(client, prompts, config))
        turns.append(answers)
        prompts = [
            f"{prompt}{answer.text} {words(draw, config.more_words)}"
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    return turns


def asked(client: httpx.Client, prompts: list[str], config: TurnsConfig) -> Iterator[Answer]:
    with ThreadPoolExecutor(config.concurrency) as pool:
        yield from pool.map(lambda prompt: ask(client, prompt, config.answer_len), prompts)


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def ask(client: httpx.Client, prompt: str, max_tokens: int) -> Answer:
    """Streams one completion."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, first, start = "", 0.0, time.perf_counter()
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise SystemExit(f"a request failed: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            first = first or time.perf_counter() - start
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, first, usage["prompt_tokens"], cached)


if __name__ == "__main__":
    main()
