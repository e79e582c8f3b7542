"""Reports whether anything grows while a stack serves mixed traffic for long.

    python -m tests.chaos.soak --minutes 30                               # starts the default model
    python -m tests.chaos.soak --minutes 30 --url http://127.0.0.1:8000   # a stack of this machine that runs

Every half minute the clients pause until nothing runs, and each service is measured: resident memory (an executor's
without the KV cache: the system gives its pages when they are first written), descriptors, threads, asyncio tasks,
and the free blocks of the KV cache.

It fails if a request gets an answer that it does not deserve; if, in a pause, a block is not free; or if something
rises after the warm-up, which is the first half: the Theil-Sen slope over the second half must not exceed 16 MiB of
memory per hour, nor 4 descriptors, threads or tasks per hour. A run of less than ten minutes is too short for slopes:
these are printed only.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import serving
from pagewire.config import ServeConfig
from tests.chaos.traffic import Traffic
from tests.chaos.trend import Sample, second_half, slope_per_hour

MIB = 1 << 20
PERIOD_S = 30.0
IDLE_TIMEOUT_S = 60.0
NUM_CLIENTS = 8
KV_CACHE_BYTES = 512 * MIB  # of the stack that is started: soon full, so that blocks are found, and lost to others
# Likewise; used as in the traffic, one takes a fifth of a MiB.
GRAMMAR_CACHE_SIZE = 32
KV_CACHE = "MiB of KV cache"
# By column: what it may rise in an hour. The KV cache has a size of its own.
BOUNDS = {"MiB": 16.0, "descriptors": 4.0, "threads": 4.0, "tasks": 4.0, KV_CACHE: float("inf")}
LEAST_MINUTES = 10.0
_KV_CACHE_BYTES = "pagewire:executor_kv_cache_resident_bytes"


@dataclass
class Series:
    """The measurements of one service, by column."""

    pid: int
    columns: dict[str, list[Sample]] = field(default_factory=lambda: {name: [] for name in BOUNDS})

    def measure(self, seconds: float, metrics: dict[str, float]) -> None:
        """Records one sample. metrics: the service's own, by name."""
        process = psutil.Process(self.pid)
        memory = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
        kv_cache = metrics.get(_KV_CACHE_BYTES, 0.0)
        values = {
            "MiB": (memory - kv_cache) / MIB,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "tasks": metrics["pagewire:asyncio_tasks"],
            KV_CACHE: kv_cache / MIB,
        }
        for name, value in values.items():
            self.columns[name].append((seconds, value))

    def latest(self) -> str:
        return "  ".join(f"{samples[-1][1]:8.1f} {name}" for name, samples in self.columns.items() if samples[-1][1])


class Soak:
    def __init__(self, http: httpx.AsyncClient, traffic: Traffic) -> None:
        self.series: dict[str, Series] = {}  # by service
        self.problems: list[str] = []
        self._http = http
        self._traffic = traffic

    async def run(self, minutes: float) -> None:
        started = time.monotonic()
        while (elapsed := time.monotonic() - started) < 60 * minutes:
            await self._traffic.run(self._http.base_url, min(PERIOD_S, 60 * minutes - elapsed))
            await self._wait_idle()
            await self._measure(time.monotonic() - started)
        self.problems += self._traffic.problems
        risen = rises(self.series)
        self.problems += risen if minutes >= LEAST_MINUTES else []

    async def _wait_idle(self) -> None:
        """Nothing runs or waits, and all blocks are free."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while (left := await self._what_is_left()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        if left:
            self.problems.append(f"{IDLE_TIMEOUT_S:g} s after the last request there are still {left}")

    async def _what_is_left(self) -> str:
        status = (await self._http.get("/v1/status")).json()
        requests = status["requests"]
        groups = [group for replica in status["replicas"] for group in replica["groups"]]
        num_held = sum(group["used"] for group in groups)
        counts = {"running requests": requests["running"], "waiting requests": requests["waiting"], "blocks": num_held}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    async def _measure(self, seconds: float) -> None:
        metrics = await self._metrics()
        status = (await self._http.get("/v1/status")).json()
        for service in status["services"]:
            name, pid = service["service"], service["pid"]
            series = self.series.setdefault(name, Series(pid))
            if series.pid != pid:
                self.problems.append(f"the {name} has died: process {series.pid} was replaced by {pid}")
                series = self.series[name] = Series(pid)
            series.measure(seconds, metrics[name])
        num_requests = sum(self._traffic.counts.values())
        print(f"{seconds / 60:6.1f} min, {num_requests} requests, {len(self._traffic.problems)} problems", flush=True)
        for name, series in self.series.items():
            print(f"    {name:10} {series.latest()}", flush=True)

    async def _metrics(self) -> dict[str, dict[str, float]]:
        """By service and name, of those without other labels than the model's name."""
        text = (await self._http.get("/metrics")).text
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "service" in sample.labels and sample.labels.keys() <= {"service", "model_name"}:
                    found.setdefault(sample.labels["service"], {})[sample.name] = sample.value
        return found


def rises(series: dict[str, Series]) -> list[str]:
    """Returns what rises after the warm-up; prints all slopes."""
    found = []
    for service, one in series.items():
        for name, samples in one.columns.items():
            slope, bound = slope_per_hour(second_half(samples)), BOUNDS[name]
            print(f"{service:10} {name:12} {slope:+8.1f} per hour; {bound:g} are allowed", flush=True)
            if slope > bound:
                found.append(f"the {service}'s {name} rise by {slope:.1f} per hour; {bound:g} are allowed")
    return found


async def soak(url: str, minutes: float, seed: int) -> list[str]:
    """Something went wrong during the soak."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        one = Soak(http, Traffic(NUM_CLIENTS, seed))
        await one.run(minutes)
    return one.problems


def _small_caches() -> ServeConfig:
    return ServeConfig(log_level="warning", kv_cache_memory_bytes=KV_CACHE_BYTES, grammar_cache_size=GRAMMAR_CACHE_SIZE)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--url", help="REST address of a stack on this machine; without it, one is started")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    own = nullcontext() if arguments.url else serving.server(_small_caches())
    with own as started:
        url = arguments.url if started is None else f"http://127.0.0.1:{started[1]}"
        problems = asyncio.run(soak(url, arguments.minutes, arguments.seed))
    for problem in problems[:20]:
        print(problem)
    sys.exit(f"failed: {len(problems)} problems" if problems else None)


if __name__ == "__main__":
    main()
