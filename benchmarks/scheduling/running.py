"""Scheduling on a running stack, as clients of its public gRPC service see it."""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc

from pagewire.client import Client
from pagewire.stack.address import grpc_address
from pagewire.tools.bench.prompts import RandomWords
from pagewire.v1 import inference_pb2_grpc
from pagewire.wire.generate_request import generate_request
from pagewire.wire.rpc import channel
from pagewire.wire.status.error_details import retry_delay_of

PARTS = ("flood", "tenants", "queue", "shares")
TENANT_HEADER = "x-tenant-id"
STREAM_TOKENS = 2000


@dataclass
class Stream:
    """A request, and when its tokens came, seconds."""

    tenant: str
    num_prompt_tokens: int
    start: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list)  # of responses with tokens
    num_tokens: list[int] = field(default_factory=list)  # in each
    refused_after: float | None = None
    retry_delay: float | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start if self.times else float("nan")

    def rate(self, start: float, end: float) -> float:
        """Tokens per second in between."""
        got = sum(num for time, num in zip(self.times, self.num_tokens, strict=True) if start <= time < end)
        return got / (end - start)

    def longest_gap(self, start: float, end: float) -> float:
        """Between two responses, of which the first came in between."""
        return max((b - a for a, b in pairwise(self.times) if start <= a < end), default=float("nan"))


class Users:
    """Clients that ask the stack, each in a task of its own."""

    def __init__(self, stub: Any, words: RandomWords, tasks: asyncio.TaskGroup) -> None:
        self._stub = stub
        self._words = words
        self._tasks = tasks

    def ask(self, num_prompt_tokens: int, max_tokens: int, tenant: str = "") -> tuple[Stream, asyncio.Task[None]]:
        (prompt,) = self._words.prompts(num_prompt_tokens, 1)
        stream = Stream(tenant, num_prompt_tokens)
        return stream, self._tasks.create_task(self._read(stream, prompt, max_tokens))

    async def _read(self, stream: Stream, prompt: str, max_tokens: int) -> None:
        options: Any = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
        metadata = [(TENANT_HEADER, stream.tenant)] if stream.tenant else None
        call = self._stub.Generate(generate_request(prompt, options), metadata=metadata)
        try:
            async for response in call:
                if response.token_ids:
                    stream.times.append(time.monotonic())
                    stream.num_tokens.append(len(response.token_ids))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            stream.refused_after = time.monotonic() - stream.start
            stream.retry_delay = retry_delay_of(error)
        finally:
            call.cancel()


async def report(args: argparse.Namespace) -> None:
    address = grpc_address(args.address)
    async with Client(address) as client, channel(address) as connection:

        async def count_tokens(text: str) -> int:
            return len(await client.tokenize(text))

        words = await RandomWords.measured(None, args.prompt_tokens, count_tokens)
        stub = inference_pb2_grpc.InferenceServiceStub(connection)
        for part in args.only:
            async with asyncio.TaskGroup() as tasks:
                users = Users(stub, words, tasks)
                if part in ("flood", "tenants"):
                    print(await flood(users, ("a", "b") if part == "tenants" else ("", ""), args), flush=True)
                elif part == "queue":
                    print(await queue(users, args), flush=True)
                else:
                    print(await shares(users, args), flush=True)


async def flood(users: Users, tenants: Sequence[str], args: argparse.Namespace) -> str:
    """Floods a running server. tenants: of the flood, and of the stream and the chat."""
    stream, streaming = users.ask(50, STREAM_TOKENS, tenants[1])
    await asyncio.sleep(1)
    alone_since = time.monotonic()
    ttfts = []
    for _ in range(5):
        chat, done = users.ask(60, 16, tenants[1])
        await done
        ttfts.append(chat.ttft)
    await asyncio.sleep(1)
    start = time.monotonic()
    longs = [users.ask(args.prompt_tokens, 16, tenants[0]) for _ in range(args.prompts)]
    await asyncio.sleep(0.5)
    chat, _ = users.ask(60, 16, tenants[1])
    await asyncio.gather(*(task for _, task in longs))
    end = time.monotonic()
    await streaming
    all_end = time.monotonic()
    if not all(one.times for one, _ in longs):
        raise SystemExit("a prompt of the flood was refused: start the stack with --max-queue-time 0")
    prompts_end = min(max(one.times[0] for one, _ in longs), stream.times[-1])
    name = "tenants" if tenants[0] else "flood"
    return (
        f"{name}: {args.prompts} prompts of {args.prompt_tokens} tokens done after {end - start:.2f} s, "
        f"with the stream's {STREAM_TOKENS} after {all_end - start:.2f} s; "
        f"first token of a chat {chat.ttft:.3f} s (alone {sorted(ttfts)[2]:.3f}); "
        f"stream {stream.rate(start, prompts_end):.1f} tokens/s (before {stream.rate(alone_since, start):.1f}), "
        f"longest gap {1000 * stream.longest_gap(start, prompts_end):.0f} ms "
        f"(before {1000 * stream.longest_gap(alone_since, start):.0f})"
    )


async def queue(users: Users, args: argparse.Namespace) -> str:
    longs = [users.ask(64, 1000) for _ in range(args.streams)]
    await asyncio.sleep(args.seconds / 2)
    short, done = users.ask(20, 8)
    await asyncio.wait([done], timeout=args.seconds / 2)
    for _, task in [*longs, (short, done)]:
        task.cancel()
    refused = sorted(one.refused_after for one, _ in longs if one.refused_after is not None)
    told = f", after {refused[len(refused) // 2]:.3f} s in the median" if refused else ""
    if short.refused_after is not None:
        fate = f"refused after {short.refused_after:.3f} s and told to come back in {short.retry_delay or 0:.1f} s"
    else:
        fate = f"first token after {short.ttft:.3f} s" if short.times else f"nothing in {args.seconds / 2:g} s"
    return f"queue: {args.streams} long streams, {len(refused)} refused{told}; a short one: {fate}"


async def shares(users: Users, args: argparse.Namespace) -> str:
    kinds = {"prompts": (1000, 8), "chats": (100, 100), "short": (30, 20), "texts": (20, 300)}
    draw = random.Random(1)
    asked = [users.ask(*kinds[name], name) for name in draw.sample(list(kinds) * 60, 60 * len(kinds))]
    await asyncio.sleep(args.seconds)
    for _, task in asked:
        task.cancel()
    served = dict.fromkeys(kinds, 0.0)
    for one, _ in asked:
        served[one.tenant] += (one.num_prompt_tokens if one.times else 0) + 2 * sum(one.num_tokens)
    total = sum(served.values())
    jain = total**2 / (len(served) * sum(value**2 for value in served.values()))
    parts = ", ".join(f"{name} {value / total:.2f}" for name, value in served.items())
    return f"shares of 4 tenants: {parts}; Jain's index {jain:.3f}"
