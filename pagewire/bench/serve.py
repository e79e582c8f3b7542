"""`pagewire bench serve`: latency and throughput of a server under a given load."""

import asyncio
import logging
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from pagewire import flags
from pagewire.bench import prompts, report
from pagewire.bench.config import BenchConfig
from pagewire.bench.http import Connection, HttpError
from pagewire.bench.request import Record, body, send
from pagewire.errors import StartupError

DEFAULT_CONCURRENCY = 8


def main(argv: Sequence[str]) -> int:
    """0, or 1 if every request failed."""
    if not argv or argv[0] != "serve":
        print("usage: pagewire bench serve [flags]\nsee `pagewire bench serve --help`", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    config = flags.parse(
        BenchConfig,
        argv[1:],
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
    with closing(_connection(config)) as connection:
        model = config.model or await _first_model(connection, config)
        prompt_list = await _prompts(config, connection, model)
        for prompt in prompt_list[: config.warmup]:
            await _must_answer(connection, config, model, prompt, config.output_len)
    before = _cpu_seconds()
    records = await _load(config, [body(config, model, p, config.output_len) for p in prompt_list[config.warmup :]])
    summary = report.summarise(config, model, records, _cpu_seconds() - before)
    print(report.table(summary))
    if config.json_out:
        report.write_json(Path(config.json_out), summary, records)
    return 0 if summary["completed"] else 1


def _connection(config: BenchConfig) -> Connection:
    key = config.api_key or os.environ.get("OPENAI_API_KEY")
    try:
        # As OpenAI's clients write it, with /v1, or without.
        return Connection(
            config.base_url.rstrip("/").removesuffix("/v1"), {"Authorization": f"Bearer {key}"} if key else {}
        )
    except ValueError as error:
        raise StartupError(f"--base-url: {error}") from error


async def _first_model(connection: Connection, config: BenchConfig) -> str:
    try:
        return str((await connection.json("GET", "/v1/models"))["data"][0]["id"])
    except (OSError, HttpError, asyncio.IncompleteReadError) as error:
        raise StartupError(f"no answer from {config.base_url} ({error}): is the server running?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise StartupError(f"{config.base_url}/v1/models lists no model: name one with --model") from error


async def _prompts(config: BenchConfig, connection: Connection, model: str) -> list[str]:
    count = config.warmup + config.num_prompts
    if config.prompts_file:
        return prompts.from_file(config, count)

    async def count_tokens(prompt: str) -> int:
        record = await _must_answer(connection, config, model, prompt, 1)
        return record.prompt_tokens if record.prompt_tokens is not None else len(prompt.split())

    return await prompts.random_words(config, count, count_tokens)


async def _must_answer(connection: Connection, config: BenchConfig, model: str, prompt: str, max_tokens: int) -> Record:
    record = await send(connection, config.endpoint, body(config, model, prompt, max_tokens), config.timeout)
    if record.error is not None:
        raise StartupError(f"a request before the measurement failed: {record.error}")
    return record


async def _load(config: BenchConfig, requests: list[dict[str, Any]]) -> list[Record]:
    """Closed loop: always `concurrency` in flight. Open loop: started at `request_rate`, `concurrency` at most."""
    records: list[Record] = []
    idle: list[Connection] = []
    slots = asyncio.Semaphore(config.concurrency or len(requests))

    async def one(request: dict[str, Any]) -> None:
        connection = idle.pop() if idle else _connection(config)
        records.append(await send(connection, config.endpoint, request, config.timeout))
        idle.append(connection)
        slots.release()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for start, request in zip(_starts(config), requests, strict=False):
            await asyncio.sleep(max(0.0, started + start - time.perf_counter()))
            await slots.acquire()
            tasks.create_task(one(request))
    for connection in idle:
        connection.close()
    return sorted(records, key=lambda record: record.start)


def _starts(config: BenchConfig) -> Iterator[float]:
    """Seconds after the first start; the gaps are gamma distributed with mean 1/request_rate, 0 in a closed loop."""
    draw = random.Random(config.seed)
    start, shape = 0.0, config.burstiness
    while True:
        yield start
        if config.request_rate:
            start += draw.gammavariate(shape, 1 / (config.request_rate * shape))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
