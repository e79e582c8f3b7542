"""What a grammar costs: `python -m benchmarks.grammar_cost [--url URL] [--streams 32] [--tokens 128] [--rounds 5]`.

Streams of a running server, all free and all held to a JSON schema, in turns; both have the same prompts and as many
tokens. Prints tokens per second of each round, and what the median of the constrained ones is of that of the free ones.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

import httpx

# Longer than any output: no stream ends early.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


async def round_of(client: httpx.AsyncClient, streams: int, tokens: int, extra: dict[str, Any]) -> float:
    """Tokens per second."""

    async def one(number: int) -> int:
        body = {
            "prompt": f"A list of {number} people as JSON:",
            "max_tokens": tokens,
            "seed": number,
            "ignore_eos": True,
        }
        answer = await client.post("/v1/completions", json=body | extra)
        answer.raise_for_status()
        return answer.json()["usage"]["completion_tokens"]

    start = time.perf_counter()
    counts = await asyncio.gather(*map(one, range(streams)))
    assert set(counts) == {tokens}, counts
    return sum(counts) / (time.perf_counter() - start)


async def run(url: str, streams: int, tokens: int, rounds: int) -> None:
    speeds: dict[str, list[float]] = {"free": [], "constrained": []}
    extras = {"free": {}, "constrained": {"structured_outputs": {"json": SCHEMA}}}
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for number in range(rounds + 1):
            for kind, extra in extras.items():
                speed = await round_of(client, streams, tokens, extra)
                if number:  # the first round warms up
                    speeds[kind].append(speed)
                    print(f"{kind:12} {speed:8.1f} tokens/s", flush=True)
    ratio = statistics.median(speeds["constrained"]) / statistics.median(speeds["free"])
    print(f"constrained streams have {ratio:.1%} of the speed of free ones")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    asyncio.run(run(args.url, args.streams, args.tokens, args.rounds))


if __name__ == "__main__":
    main()
