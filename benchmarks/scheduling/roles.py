"""Measures what roles are worth on this machine: `python -m benchmarks.scheduling.roles [MODEL]`.

Two executors serve the same requests, once with a role each (one computes prompts, the other decodes), once both doing
both, in turns. Streams begin at a fixed rate, and so do long prompts; the requests and their times are the same in all
runs, so the throughput is the same if a stack keeps up. Reported, over all runs of a kind:

inter-token latency  time between two responses of a stream, divided among the tokens of the second
tokens per second    of all requests, from the first arrival to the last token
first token          of streams, and of long prompts
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.scheduling.running import Stream, Users
from pagewire.client import Client
from pagewire.config import DEFAULT_MODEL, ServeConfig
from pagewire.stack.own_stack import OwnStack
from pagewire.tools.bench.prompts import RandomWords
from pagewire.v1 import inference_pb2_grpc
from pagewire.wire.rpc import channel

KINDS = {"roles": 1, "both": 0}  # executors that only compute prompts


@dataclass
class Run:
    """The requests of one run."""

    streams: list[Stream] = field(default_factory=list)
    longs: list[Stream] = field(default_factory=list)
    seconds: float = 0.0  # from the first arrival to the last token

    @property
    def num_tokens(self) -> int:
        return sum(one.num_prompt_tokens + sum(one.num_tokens) for one in self.streams + self.longs)


def gaps(stream: Stream) -> list[float]:
    """Returns the seconds before each token of a stream but the first ones."""
    between = zip(pairwise(stream.times), stream.num_tokens[1:], strict=True)
    return [(b - a) / num for (a, b), num in between for _ in range(num)]


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def row(kind: str, runs: Sequence[Run]) -> str:
    """Returns the figures of all runs of one kind."""
    between = [gap for run in runs for stream in run.streams for gap in gaps(stream)]
    rate = sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)
    first = quantile([stream.ttft for run in runs for stream in run.streams], 0.5)
    first_long = quantile([stream.ttft for run in runs for stream in run.longs], 0.5)
    p50, p90, p99 = (1000 * quantile(between, share) for share in (0.5, 0.9, 0.99))
    return f"{kind:>6} {p50:8.1f} {p90:8.1f} {p99:8.1f} {rate:10.0f} {1000 * first:10.0f} {1000 * first_long:10.0f}"


async def run(address: str, args: argparse.Namespace, seed: int) -> Run:
    """Sends all requests of a run. seed: of their times and prompts."""
    async with Client(address) as client, channel(address) as connection:

        async def count_tokens(text: str) -> int:
            return len(await client.tokenize(text))

        words = await RandomWords.measured(seed, args.prompt_tokens, count_tokens)
        stub = inference_pb2_grpc.InferenceServiceStub(connection)
        async with asyncio.TaskGroup() as tasks:  # what is compiled or learned first is no part of the figures
            warm = Users(stub, words, tasks)
            await asyncio.gather(*(warm.ask(args.prompt_tokens // 2, 16)[1] for _ in range(4)))
            await asyncio.gather(*(warm.ask(30, 64)[1] for _ in range(4)))
        chance, made = random.Random(seed), Run()
        arrivals = [(chance.uniform(0, args.seconds), False) for _ in range(round(args.seconds * args.stream_rate))]
        arrivals += [(chance.uniform(0, args.seconds), True) for _ in range(round(args.seconds * args.prompt_rate))]
        start = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            users = Users(stub, words, tasks)
            for at, is_long in sorted(arrivals):
                await asyncio.sleep(max(0.0, start + at - time.monotonic()))
                if is_long:
                    made.longs.append(users.ask(args.prompt_tokens, args.prompt_output)[0])
                else:
                    made.streams.append(users.ask(30, args.stream_tokens)[0])
        made.seconds = time.monotonic() - start
        return made


async def main(args: argparse.Namespace) -> None:
    """Measures and prints."""
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        for kind, num_prefill in KINDS.items():
            config = ServeConfig(
                model=args.model,
                data_parallel_size=2,
                prefill_executors=num_prefill,
                spec_method="none",
                max_queue_time=0.0,
                port=args.port,
                grpc_port=args.port + 1,
                log_level="warning",
                num_threads=args.threads,
            )
            stack = OwnStack(config, with_rest=False)
            try:
                await asyncio.to_thread(stack.await_ready)
                runs[kind].append(await run(stack.grpc, args, number))
            finally:
                await asyncio.to_thread(stack.close)
            print(f"round {number + 1}: {row(kind, runs[kind][-1:])}", flush=True)
    print("\n       inter-token latency, ms      tokens    first token, ms\n", end="")
    print("            p50      p90      p99    per s        stream       long")
    for kind, made in runs.items():
        print(row(kind, made))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--port", type=int, default=8000, help="and the next one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40, help="in which requests arrive, in each run")
    parser.add_argument("--stream-rate", type=float, default=0.2, help="streams per second")
    parser.add_argument("--stream-tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--prompt-rate", type=float, default=0.15, help="long prompts per second")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="of each of them")
    parser.add_argument("--prompt-output", type=int, default=8, help="tokens that each of them yields")
    parser.add_argument("--threads", type=int, help="of each executor (default: its share of the cores)")
    asyncio.run(main(parser.parse_args()))
