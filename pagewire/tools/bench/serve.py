"""`pagewire bench serve`: latency and throughput of a server under a given load."""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvloop

from pagewire import flags
from pagewire.tools.bench import drafts, load, prompts, report
from pagewire.tools.bench.config import BenchConfig
from pagewire.tools.bench.http import Connection
from pagewire.tools.bench.request import body

DEFAULT_CONCURRENCY = 8


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if every request failed."""
    config = flags.parse(
        BenchConfig,
        argv,
        prog="pagewire bench serve",
        description="Measures a server that speaks the OpenAI API: time to first token (TTFT), time per output token"
        " after it (TPOT), gaps between chunks (ITL), throughput and failures.",
        flags_only=True,
    )
    if config.concurrency is None and config.request_rate is None:
        config = replace(config, concurrency=DEFAULT_CONCURRENCY)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    return uvloop.run(_bench(config))


async def _bench(config: BenchConfig) -> int:
    with closing(load.connect(config)) as connection:
        model = config.model or (await load.served_model(connection, config)).name
        prompt_list = await _prompts(config, connection, model)
        for prompt in prompt_list[: config.warmup]:
            await load.must_answer(connection, config, model, prompt, config.output_len)
        drafted_before = await drafts.read(connection)
        before, bodies = load.cpu_seconds(), [body(config, model, p, config.output_len) for p in prompt_list]
        records = await load.run(config, bodies[config.warmup :])
        summary = report.summarise(config, model, records, load.cpu_seconds() - before)
        drafted = await drafts.read(connection)
    if drafted.num_tokens:  # since the server's start, so it drafts
        drafted = drafted.since(drafted_before)
        summary |= {"speculation": drafted.figures()}
    print(report.table(summary))
    if "speculation" in summary:
        print(f"  {drafted.line()}")
    if config.json_out:
        report.write_json(Path(config.json_out), summary, records)
    return 0 if summary["completed"] else 1


async def _prompts(config: BenchConfig, connection: Connection, model: str) -> list[str]:
    count = config.warmup + config.num_prompts
    if config.prompts_file:
        return prompts.from_file(config, count)
    count_tokens = partial(load.count_tokens, connection, config, model)
    words = await prompts.RandomWords.measured(config.seed, config.input_len, count_tokens)
    return words.prompts(config.input_len, count)
