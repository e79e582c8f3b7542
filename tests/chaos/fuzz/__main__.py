"""Fuzzing of every entry: no request may end a process, be answered with an internal error, or leave something behind.

    python -m tests.chaos.fuzz                               # all of them, 1000 cases each
    python -m tests.chaos.fuzz grpc --cases 20000 --seed 7
    python -m tests.chaos.fuzz grpc --cases 1 --seed 4711    # one case again

Case i of a run has the seed --seed + i. Each fuzzer runs in a process of its own; the death of that process is a
finding."""

import argparse
import asyncio
import faulthandler
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path

from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from tests.chaos.fuzz import executor as fuzz_executor
from tests.chaos.fuzz import floods as fuzz_floods
from tests.chaos.fuzz import grammars as fuzz_grammars
from tests.chaos.fuzz import grpc as fuzz_grpc
from tests.chaos.fuzz import http as fuzz_http
from tests.chaos.fuzz import openapi as fuzz_openapi
from tests.chaos.fuzz import stack as fuzz_stack
from tests.chaos.fuzz import texts as fuzz_texts
from tests.chaos.fuzz.line import Finding, FuzzLine, running_line
from tests.chaos.fuzz.mutation import Mutator

NUM_CASES = 1000
_NUM_BETWEEN_CHECKS = 20  # cases
_CASES_PER_FLOOD = 5  # cases of others, which take less time
_CASES_PER_EXAMPLE = 50  # of each of so many operations, by Schemathesis


async def fuzz_line(fuzz: Callable[[FuzzLine, int], Awaitable[None]], line: FuzzLine, seeds: Sequence[int]) -> None:
    """Cases over the line, which is looked at now and then. Raises Finding."""
    for count, seed in enumerate(seeds, start=1):
        with naming(seed):
            await fuzz(line, seed)
        if count % _NUM_BETWEEN_CHECKS == 0 or count == len(seeds):
            with naming(seed, f"one of the seeds {seeds[(count - 1) // _NUM_BETWEEN_CHECKS * _NUM_BETWEEN_CHECKS]} to"):
                await line.check()


class naming:
    """Says which seed a Finding is of."""

    def __init__(self, seed: int, words: str = "seed") -> None:
        self._which = f"{words} {seed}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            raise Finding(f"{self._which}: {type(error).__name__}: {error}") from error


async def _over_line(fuzz: Callable[[FuzzLine, int], Awaitable[None]], seeds: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        async with running_line(Path(directory), resolve_model(DEFAULT_MODEL)) as line:
            await fuzz_line(fuzz, line, seeds)


async def _http(seeds: Sequence[int]) -> None:
    await _over_line(fuzz_http.fuzz, seeds)


async def _grpc(seeds: Sequence[int]) -> None:
    await _over_line(fuzz_grpc.fuzz, seeds)


async def _openapi(seeds: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        async with running_line(Path(directory), resolve_model(DEFAULT_MODEL)) as line:
            await fuzz_openapi.fuzz(line, max(1, len(seeds) // _CASES_PER_EXAMPLE), seeds[0])


async def _executor(seeds: Sequence[int]) -> None:
    async with fuzz_executor.running_executor() as executor:
        for seed in seeds:
            with naming(seed):
                await fuzz_executor.fuzz(executor, seed)


async def _grammars(seeds: Sequence[int]) -> None:
    async with fuzz_grammars.running_grammars() as grammars:
        for number, grammar in enumerate(fuzz_grammars.CATASTROPHES):
            with naming(number, "catastrophe"):
                await fuzz_grammars.follow(grammars, grammar, Mutator(number))
        for seed in seeds:
            with naming(seed):
                await fuzz_grammars.fuzz(grammars, seed)


async def _texts(seeds: Sequence[int]) -> None:
    for seed in seeds:
        with naming(seed):
            fuzz_texts.fuzz_templates(seed)
            fuzz_texts.fuzz_stops(seed)


async def _stack(seeds: Sequence[int]) -> None:
    with fuzz_stack.running_stack() as stack:
        await fuzz_stack.fuzz(stack.url, seeds)


async def _floods(seeds: Sequence[int]) -> None:
    await _over_line(fuzz_floods.fuzz, seeds[: max(1, len(seeds) // _CASES_PER_FLOOD)])
    with fuzz_stack.running_stack() as stack:
        await fuzz_floods.fuzz_stack(stack.url, stack.grpc, seeds[: max(1, len(seeds) // _CASES_PER_FLOOD)])


FUZZERS: dict[str, Callable[[Sequence[int]], Coroutine[None, None, None]]] = {
    "openapi": _openapi,
    "stack": _stack,
    "floods": _floods,
    "http": _http,
    "grpc": _grpc,
    "executor": _executor,
    "grammars": _grammars,
    "texts": _texts,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("entries", nargs="*", metavar="ENTRY", help=f"of {', '.join(FUZZERS)}; default: all")
    parser.add_argument("--cases", type=int, default=NUM_CASES, help="of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.entries) - FUZZERS.keys():
        parser.error(f"there is no {', '.join(unknown)}")
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    if arguments.in_process:
        faulthandler.enable()
        (name,) = arguments.entries
        asyncio.run(FUZZERS[name](seeds))
        return
    failed = [name for name in arguments.entries or FUZZERS if not _passes(name, arguments.cases, arguments.seed)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else None)


def _passes(name: str, cases: int, seed: int) -> bool:
    command = [
        sys.executable,
        "-m",
        "tests.chaos.fuzz",
        name,
        "--in-process",
        f"--cases={cases}",
        f"--seed={seed}",
    ]
    code = subprocess.run(command).returncode
    print(f"{name}: {f'ended with {code}' if code else f'{cases} cases'}", flush=True)
    return code == 0


if __name__ == "__main__":
    main()
