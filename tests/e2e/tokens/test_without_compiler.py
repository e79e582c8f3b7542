"""An executor on a machine without a C++ compiler: slower, with the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import QUICK_EXECUTOR_FLAGS, short_directory
from tests.e2e.line import Line
from tests.e2e.prompts import PROMPTS

SLOW = '#!/bin/sh\n[ "$1" = --version ] && exec echo slow\nexec sleep 30\n'


@pytest.fixture
def bare_line(quick_model: Path, smollm2_gguf: Path, tmp_path: Path) -> Iterator[Line]:
    """The quick line with an empty cache, and no compiler."""
    with short_directory() as name:
        flags = {"executor": QUICK_EXECUTOR_FLAGS, "tokenizer": ["--tokenizer", str(smollm2_gguf)]}
        line = Line(Path(name), str(quick_model), **flags)
        line.environment = {"CXX": "no-such-compiler", "PAGEWIRE_CACHE_DIR": str(tmp_path / "cache")}
        try:
            for service in ("executor", "scheduler", "tokenizer", "gateway"):
                line.start(service)
            asyncio.run(line.wait_ready())
            yield line
        finally:
            line.stop()


async def texts(line: Line) -> list[str]:
    async with line.openai() as client:
        asked = (
            client.completions.create(
                model="m", prompt=prompt, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
            )
            for prompt in PROMPTS[:4]
        )
        return [answer.choices[0].text for answer in await asyncio.gather(*asked)]


def test_tokens_are_those_of_the_kernels(quick_line: Line, bare_line: Line) -> None:
    assert asyncio.run(texts(bare_line)) == asyncio.run(texts(quick_line))
    (line,) = [line for line in bare_line.log("executor").splitlines() if "CPU kernels" in line]
    assert "times slower" in line and "no-such-compiler not found" in line and "install g++" in line


def test_an_executor_that_compiles_is_stopped_at_once(quick_model: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "slow-g++"
    compiler.write_text(SLOW)
    compiler.chmod(0o755)
    with short_directory() as name:
        line = Line(Path(name), str(quick_model), executor=QUICK_EXECUTOR_FLAGS)
        line.environment = {"CXX": str(compiler), "PAGEWIRE_CACHE_DIR": str(tmp_path / "cache")}
        line.start("executor")
        try:
            asyncio.run(compiles(line))
            line.processes["executor"].terminate()
            assert line.processes["executor"].wait(20) == 0
        finally:
            line.stop()
        assert "Fatal" not in line.log("executor")


async def compiles(line: Line) -> None:
    log = line.directory / "executor.log"
    async with asyncio.timeout(60):
        while not log.exists() or "compiling the CPU kernels" not in log.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
