"""Measures the effect of an overload: `python -m benchmarks.overload [--url http://127.0.0.1:8000] [--requests 120]`.

Sends streams at the rate of the server's capacity (measured with --concurrency requests at a time), then at three times
that rate. Reports the number of admitted requests and their time to first token, and for refused ones the time to the
refusal, the time in `Retry-After`, and whether they were admitted after it.
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Results:
    first_tokens: list[float] = field(default_factory=list)  # seconds, of those let in
    refusals: list[float] = field(default_factory=list)  # seconds until they knew
    delays: list[float] = field(default_factory=list)  # seconds that they were told to wait
    num_back: int = 0
    num_let_in_then: int = 0
    num_others: int = 0


async def ask(client: httpx.AsyncClient, results: Results, max_tokens: int, *, comes_back: bool) -> None:
    words = " ".join(str(random.randrange(1000)) for _ in range(random.randrange(20, 100)))
    body = {"prompt": words, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    body |= {"temperature": 1.0, "top_p": 1.0}  # not the model's defaults
    for attempt in range(2):
        start = time.monotonic()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 200:
                has_begun = False
                async for line in response.aiter_lines():
                    if not has_begun and line.startswith("data: {"):
                        has_begun = True
                        results.first_tokens.append(time.monotonic() - start)
                        results.num_let_in_then += attempt
                return
        if response.status_code != 429:
            results.num_others += 1
            return
        if attempt:
            return
        results.refusals.append(time.monotonic() - start)
        results.delays.append(float(response.headers["retry-after-ms"]) / 1000)
        if not comes_back:
            return
        await asyncio.sleep(results.delays[-1])
        results.num_back += 1


async def at_rate(client: httpx.AsyncClient, rate: float, args: Any, *, comes_back: bool) -> Results:
    results = Results()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(args.requests):
            tasks.create_task(ask(client, results, args.max_tokens, comes_back=comes_back))
            await asyncio.sleep(random.expovariate(rate))
    return results


async def capacity(client: httpx.AsyncClient, args: Any) -> float:
    """Requests per second."""
    results, start = Results(), time.monotonic()
    left = iter(range(args.requests // 2))

    async def work() -> None:
        for _ in left:
            await ask(client, results, args.max_tokens, comes_back=False)

    await asyncio.gather(*(work() for _ in range(args.concurrency)))
    return len(results.first_tokens) / (time.monotonic() - start)


def report(name: str, results: Results) -> None:
    def percentiles(values: list[float]) -> str:
        values = sorted(values)
        return "/".join(f"{values[int(p * (len(values) - 1))]:.3f}" for p in (0.5, 0.95)) if values else "-"

    print(
        f"{name}: {len(results.first_tokens)} let in, first token p50/p95 {percentiles(results.first_tokens)} s; "
        f"{len(results.refusals)} refused after {percentiles(results.refusals)} s, told to wait "
        f"{percentiles(results.delays)} s; {results.num_let_in_then} of {results.num_back} let in when they came back; "
        f"{results.num_others} failed"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    async with httpx.AsyncClient(base_url=args.url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        rate = await capacity(client, args)
        print(f"capacity: {rate:.2f} requests/s")
        report("1x", await at_rate(client, rate, args, comes_back=False))
        report("3x", await at_rate(client, 3 * rate, args, comes_back=True))


if __name__ == "__main__":
    asyncio.run(main())
