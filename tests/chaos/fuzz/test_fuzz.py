"""The short form of `python -m tests.chaos.fuzz`, always with the same seeds."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.fuzz import executor as fuzz_executor
from tests.chaos.fuzz import floods as fuzz_floods
from tests.chaos.fuzz import grammars as fuzz_grammars
from tests.chaos.fuzz import grpc as fuzz_grpc
from tests.chaos.fuzz import http as fuzz_http
from tests.chaos.fuzz import texts as fuzz_texts
from tests.chaos.fuzz.__main__ import fuzz_line
from tests.chaos.fuzz.line import FuzzLine, running_line
from tests.chaos.fuzz.mutation import Mutator

# Those that a five-second limit does not have to end.
QUICK_CATASTROPHES = 6


@pytest.fixture
async def line(tmp_path: Path, smollm2_gguf: Path) -> AsyncIterator[FuzzLine]:
    async with running_line(tmp_path, smollm2_gguf) as line:
        yield line


async def test_rest(line: FuzzLine) -> None:
    await fuzz_line(fuzz_http.fuzz, line, range(150))


async def test_floods(line: FuzzLine) -> None:
    await fuzz_line(fuzz_floods.fuzz, line, range(40))


async def test_every_rpc(line: FuzzLine) -> None:
    await fuzz_line(fuzz_grpc.fuzz, line, range(300))


async def test_steps_of_an_executor() -> None:
    async with fuzz_executor.running_executor() as executor:
        for seed in range(60):
            await fuzz_executor.fuzz(executor, seed)


async def test_grammars() -> None:
    async with fuzz_grammars.running_grammars() as grammars:
        for number, grammar in enumerate(fuzz_grammars.CATASTROPHES[:QUICK_CATASTROPHES]):
            await fuzz_grammars.follow(grammars, grammar, Mutator(number))
        for seed in range(100):
            await fuzz_grammars.fuzz(grammars, seed)


def test_templates_and_stop_strings() -> None:
    for seed in range(300):
        fuzz_texts.fuzz_templates(seed)
        fuzz_texts.fuzz_stops(seed)
