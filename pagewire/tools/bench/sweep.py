"""`pagewire bench sweep`: throughput and latency by concurrency, time to first token by prompt length."""

import logging
import random
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial
from typing import Any

import uvloop

from pagewire import flags
from pagewire.tools.bench import load, prompts, report
from pagewire.tools.bench.config import BenchConfig, ServerFlags, SweepConfig
from pagewire.tools.bench.growth import Growth, Load, loads
from pagewire.tools.bench.request import body

# The words per token are measured with a prompt of this length, or of the longest one if that is shorter.
_COUNTED_LEN = 512
_FIGURES = ("output_tok_per_s", "req_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if any request failed."""
    config = flags.parse(
        SweepConfig,
        argv,
        prog="pagewire bench sweep",
        description="Measures a server that speaks the OpenAI API under growing load: output tokens per second,"
        " time to first token (TTFT) and per output token after it (TPOT) against requests in flight; TTFT against"
        " prompt length. Every prompt is new. `pagewire bench plot` draws the curves.",
        flags_only=True,
    )
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    return uvloop.run(_sweep(config))


async def _sweep(config: SweepConfig) -> int:
    with closing(load.connect(config)) as connection:
        model = await load.served_model(connection, config)
        planned = loads(config, model.max_model_len)
        growth = Growth(config, model.name, shlex.join(["pagewire", "bench", "sweep", *flags.to_argv(config)]))
        counted = min(_COUNTED_LEN, max(one.input_len for one in planned))
        seed = random.randrange(2**32) if config.seed is None else config.seed
        count_tokens = partial(load.count_tokens, connection, config, model.name)
        words = await prompts.RandomWords.measured(seed, counted, count_tokens)
        warm_up = words.prompts(planned[0].input_len, 1)[0]
        await load.must_answer(connection, config, model.name, warm_up, planned[0].output_len)
    for one in planned:
        summary = await _measure(config, model.name, one, words.prompts(one.input_len, one.num_prompts))
        figures = {name: summary[name] for name in _FIGURES}
        if summary["prompt_tokens_max"] is not None:
            figures["prompt_tokens"] = summary["prompt_tokens_max"]
        growth.add(one, figures, summary["errors"])
    return 1 if growth.failures else 0


async def _measure(config: SweepConfig, model: str, one: Load, texts: Sequence[str]) -> dict[str, Any]:
    """Returns the summary of one load, as in `pagewire bench serve`."""
    server = {field.name: getattr(config, field.name) for field in fields(ServerFlags)}
    serve = BenchConfig(**server, concurrency=one.concurrency, output_len=one.output_len)
    before = load.cpu_seconds()
    records = await load.run(serve, [body(config, model, text, one.output_len) for text in texts])
    return report.summarise(serve, model, records, load.cpu_seconds() - before)
