"""Measures several models in one stack beside a stack for each: `python -m benchmarks.scheduling.together`.

Two models that generate text and one that makes vectors serve the same requests at the same time, once all in one
stack, once in three, in turns. Each model has clients that ask one request after the other. Reported, of each kind:

requests per second  of each model, and tokens per second of all, of the requests that were answered in time
memory               of all processes (PSS), when the load has ended
texts                whether each answer is the same in both (greedy; with --dtype float32 they must be)
"""

import argparse
import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from pagewire.flags.ports import available_port
from pagewire.wire import health

START_TIMEOUT_S = 600
GENERATED, VECTORS = ("smollm2-135m-instruct", "gemma-3-270m"), "all-minilm-l6-v2"
MODELS = (*GENERATED, VECTORS)


@dataclass
class Served:
    """The answers of one model, texts or vectors as lists."""

    answers: dict[int, Any] = field(default_factory=dict)  # by the number of their request
    num_tokens: int = 0


@dataclass
class Run:
    """One run of all requests. memory: bytes."""

    served: dict[str, Served]
    seconds: float
    memory: int

    def requests(self, model: str) -> float:
        """Returns requests per second."""
        return len(self.served[model].answers) / self.seconds

    @property
    def tokens(self) -> float:
        """Tokens per second that were generated."""
        return sum(one.num_tokens for one in self.served.values()) / self.seconds


@contextmanager
def stack(models: Sequence[str], options: Sequence[str]) -> Iterator[tuple[psutil.Process, int]]:
    """`pagewire serve` of these models, ready; its process and its REST port."""
    with tempfile.TemporaryDirectory() as data:
        port = available_port("127.0.0.1")
        command = [sys.executable, "-P", "-m", "pagewire.cli", "serve", *models, *options]
        command += [f"--port={port}", "--grpc-port=0", f"--data-dir={data}", "--log-level=warning"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while health.http_problem(f"http://127.0.0.1:{port}/readyz") is not None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("a stack did not start; its log above tells why")
                time.sleep(0.1)
            yield psutil.Process(process.pid), port
        finally:
            process.terminate()
            process.wait()


def memory(process: psutil.Process) -> int:
    """Returns the bytes (PSS) of a process and its descendants."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def body(model: str, number: int, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of a model's request."""
    topic = f"number {number} of a list: {number * number}, {number * 7 % 101}"
    if model == VECTORS:
        return "/v1/embeddings", {"model": model, "input": [f"A sentence about {topic}, part {i}." for i in range(8)]}
    common = {"model": model, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return "/v1/completions", {**common, "prompt": f"A story about {topic}. Once upon a time,"}


async def serve_all(ports: dict[str, int], args: argparse.Namespace) -> dict[str, Served]:
    """Asks each model, at its port, for args.seconds."""
    served = {model: Served() for model in MODELS}
    async with httpx.AsyncClient(timeout=600) as client:

        async def ask(model: str, number: int) -> dict[str, Any]:
            path, content = body(model, number, args.max_tokens)
            answer = await client.post(f"http://127.0.0.1:{ports[model]}{path}", json=content)
            answer.raise_for_status()
            result: dict[str, Any] = answer.json()
            return result

        async def user(model: str, numbers: Iterator[int]) -> None:
            own = served[model]
            for number in numbers:
                answer = await ask(model, number)
                if time.monotonic() > end:
                    return
                is_text = model != VECTORS
                own.answers[number] = (
                    answer["choices"][0]["text"] if is_text else [one["embedding"] for one in answer["data"]]
                )
                own.num_tokens += answer["usage"]["completion_tokens"] if is_text else 0

        await asyncio.gather(*(ask(model, -1 - i) for model in MODELS for i in range(2)))
        end = time.monotonic() + args.seconds
        async with asyncio.TaskGroup() as tasks:
            for model in MODELS:
                numbers = itertools.count()
                for _ in range(args.users):
                    tasks.create_task(user(model, numbers))
    return served


def run(*, together: bool, args: argparse.Namespace) -> Run:
    options = ["--accept-license=gemma", f"--dtype={args.dtype}", "--spec-method=none"]
    options += [] if args.quantization is None else [f"--quantization={args.quantization}"]
    with ExitStack() as stacks:
        groups = [MODELS] if together else [(model,) for model in MODELS]
        running = [(group, *stacks.enter_context(stack(group, options))) for group in groups]
        ports = {model: port for group, _, port in running for model in group}
        return Run(asyncio.run(serve_all(ports, args)), args.seconds, sum(memory(process) for _, process, _ in running))


def row(kind: str, runs: Sequence[Run]) -> str:
    """Returns the figures of one kind: means of its runs."""
    mean = [sum(one.requests(model) for one in runs) / len(runs) for model in MODELS]
    tokens = sum(one.tokens for one in runs) / len(runs)
    size = sum(one.memory for one in runs) / len(runs) / (1 << 20)
    return f"{kind:>10}" + "".join(f"{value:>24.2f}" for value in mean) + f"{tokens:>12.1f}{size:>12.0f}"


def main(args: argparse.Namespace) -> None:
    """Measures and prints."""
    runs: dict[str, list[Run]] = {"together": [], "apart": []}
    print(f"{'':>10}" + "".join(f"{model:>24}" for model in MODELS) + f"{'tokens/s':>12}{'MiB':>12}")
    for number in range(args.rounds):
        order = list(runs) if number % 2 == 0 else list(runs)[::-1]
        for kind in order:
            runs[kind].append(run(together=kind == "together", args=args))
            print(row(kind, runs[kind][-1:]), flush=True)
    print(f"\nmeans of {args.rounds} rounds")
    for kind, made in runs.items():
        print(row(kind, made))
    first = runs["apart"][0].served
    for model in GENERATED:
        num_other = num_compared = 0
        for one in (one for made in runs.values() for one in made):
            both = one.served[model].answers.keys() & first[model].answers.keys()
            num_compared += len(both)
            num_other += sum(one.served[model].answers[number] != first[model].answers[number] for number in both)
        print(f"{model}: {num_other} of {num_compared} texts differ from those of the first run apart")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40, help="of each run")
    parser.add_argument("--users", type=int, default=4, help="of each model, which ask one request after the other")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", help="as of `pagewire serve`")
    main(parser.parse_args())
