"""One measurement: a server with some flags under the load of the trace."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from pagewire.config import WITHOUT_TLS, ServeConfig
from pagewire.errors import StartupError
from pagewire.stack.own_stack import OwnStack
from pagewire.tools.bench import load
from pagewire.tools.bench.config import BenchConfig
from pagewire.tools.bench.http import Connection, HttpError
from pagewire.tools.bench.report import percentile
from pagewire.tools.bench.request import Record, body, send
from pagewire.tools.doctor.live import Sample, parse
from pagewire.tools.tune.trace import Request


@dataclass(frozen=True)
class Figures:
    """The figures of answered requests, with times in milliseconds. cached: share of prompt tokens in the prefix cache.
    waited: share of a request's time in the queue."""

    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    tokens_per_s: float
    resident_mib: float
    failed: int = 0
    error: str = ""  # that of the first failed request
    prompt_tokens: float = 0.0  # the average of a request
    cached: float = 0.0
    waited: float = 0.0
    preempted: int = 0


def measure(config: ServeConfig, changes: Mapping[str, Any], requests: Sequence[Request], concurrency: int) -> Figures:
    """Measures a new server. Raises StartupError if it cannot start with these flags."""
    serve = replace(config, **{**WITHOUT_TLS, "port": 0, "grpc_port": 0, "log_level": "warning", **changes})
    with closing(OwnStack(serve)) as stack:
        stack.await_ready()
        bench = BenchConfig(base_url=stack.rest, ignore_eos=True, api_key=config.own_key)
        try:
            return uvloop.run(_drive(bench, requests, concurrency, stack.pid))
        except (OSError, EOFError, HttpError) as error:
            raise StartupError(f"the measured server disappeared: {error or type(error).__name__}") from error


async def _drive(bench: BenchConfig, requests: Sequence[Request], concurrency: int, pid: int) -> Figures:
    with closing(load.connect(bench)) as connection:
        model = (await load.served_model(connection, bench)).name
        await load.must_answer(connection, bench, model, "warm up", 8)
        before = await _scrape(connection)
        records = await _send(bench, model, requests, concurrency)
        return _figures(records, before, await _scrape(connection), _resident_mib(pid))


async def _send(bench: BenchConfig, model: str, requests: Sequence[Request], concurrency: int) -> list[Record]:
    started = time.perf_counter()
    slots = asyncio.Semaphore(len(requests) if requests[0].at is not None else concurrency)

    async def one(request: Request) -> Record:
        async with slots:
            await asyncio.sleep(max(0.0, started + (request.at or 0.0) - time.perf_counter()))
            with closing(load.connect(bench)) as connection:
                asked = body(bench, model, request.prompt, request.max_tokens)
                return await send(connection, bench.endpoint, asked, bench.timeout)

    return list(await asyncio.gather(*map(one, requests)))


async def _scrape(connection: Connection) -> Sample:
    _, _, text = await connection.exchange("GET", "/metrics", None)
    return parse(text.decode(), time.monotonic())


def _figures(records: Sequence[Record], before: Sample, after: Sample, resident_mib: float) -> Figures:
    answered = [record for record in records if record.error is None]
    errors = [record.error for record in records if record.error is not None]
    if not answered:
        raise StartupError(f"none of {len(records)} requests was answered: {errors[0]}")
    wall = max(one.end for one in records) - min(one.start for one in records)
    ttft = [one.ttft * 1e3 for one in answered if one.ttft is not None]
    tpot = [one.tpot * 1e3 for one in answered if one.tpot is not None]
    prompts = [one.prompt_tokens for one in answered if one.prompt_tokens is not None]

    def grown(name: str) -> float:
        return after.of(f"pagewire:{name}") - before.of(f"pagewire:{name}")

    in_all = sum(one.end - one.start for one in answered)
    return Figures(
        ttft_ms=_mean(ttft),
        ttft_p99_ms=percentile(ttft, 99) or 0.0,
        tpot_ms=_mean(tpot),
        tpot_p99_ms=percentile(tpot, 99) or 0.0,
        tokens_per_s=sum(one.completion_tokens for one in answered) / wall,
        resident_mib=resident_mib,
        failed=len(errors),
        error=errors[0] if errors else "",
        prompt_tokens=_mean(prompts),
        cached=grown("prefix_cache_hits_total") / max(1.0, grown("prefix_cache_queries_total")),
        waited=grown("request_queue_time_seconds_sum") / max(1e-9, in_all),
        preempted=int(grown("num_preemptions_total")),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _resident_mib(pid: int) -> float:
    """Returns the memory of a process and its descendants, by /proc."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents.setdefault(int(words[1]), []).append(int(path.parent.name))
    found, total = [pid], 0
    while found:
        one = found.pop()
        found += parents.get(one, [])
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def median(measured: Sequence[Figures]) -> Figures:
    """Returns the medians of all quantities."""
    fields = dataclasses.fields(Figures)
    values = {f.name: sorted(getattr(one, f.name) for one in measured) for f in fields}
    return Figures(**{name: all_of[len(all_of) // 2] for name, all_of in values.items()})
