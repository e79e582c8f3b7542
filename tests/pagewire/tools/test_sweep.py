"""`pagewire bench sweep` against a server that counts words."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.errors import StartupError
from pagewire.tools.bench import curves
from pagewire.tools.bench.config import SweepConfig
from pagewire.tools.bench.growth import loads
from tests.pagewire.tools.openai_server import Server, listening, run_bench, write_whole

# Two requests that find out how long words are, and one that warms up.
BEFORE = 3
SMALL = ("--input-len=20", "--output-len=4", "--num-prompts=2")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with listening() as server:
        yield server


async def sweep(server: Server, path: Path, *argv: str) -> tuple[int, str]:
    return await run_bench("sweep", "--base-url", server.base_url, "--json-out", str(path), *SMALL, *argv)


async def test_both_curves(server: Server, tmp_path: Path) -> None:
    all_there = asyncio.Event()

    async def three_meet(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if BEFORE + 2 < len(server.bodies) <= BEFORE + 5:
            if server.in_flight == 3:
                all_there.set()
            await all_there.wait()
        await server.stream(body, writer)

    server.answer = three_meet
    path = tmp_path / "c.json"
    code, text = await sweep(server, path, "--concurrency=3,1", "--prompt-lens=10,40", "--api-key=hush", "--label=ours")
    assert code == 0, text
    by_kind = {curve.kind: curve for curve in curves.read(path)}
    assert list(by_kind) == ["concurrency", "prompt-length"]
    assert {(curve.label, curve.model) for curve in by_kind.values()} == {("ours", "m")}
    at_once = by_kind["concurrency"].points
    assert [(p["concurrency"], p["num_requests"], p["prompt_tokens"]) for p in at_once] == [(1, 2, 20), (3, 3, 20)]
    assert all(p["output_tok_per_s"] > 0 and p["ttft_p50_ms"] > 0 and p["tpot_p50_ms"] > 0 for p in at_once)
    assert [p["prompt_tokens"] for p in by_kind["prompt-length"].points] == [10, 40]
    measured = server.bodies[BEFORE:]
    assert [body["max_tokens"] for body in measured] == [4] * 5 + [1] * 4
    assert len({body["prompt"] for body in server.bodies}) == len(server.bodies), "no prefix cache knows any of them"
    assert "Bearer hush".lower() in server.authorization and "hush" not in path.read_text()
    assert "--prompt-lens=10,40" in by_kind["concurrency"].command


async def test_prompts_are_others_each_time(server: Server, tmp_path: Path) -> None:
    argv = ("--only=concurrency", "--concurrency=1")
    for label in ("first", "second", "second"):
        code, text = await sweep(server, tmp_path / "c.json", *argv, "--label", label)
        assert code == 0, text
    assert len({body["prompt"] for body in server.bodies}) == len(server.bodies)
    assert [curve.label for curve in curves.read(tmp_path / "c.json")] == ["first", "second"], "taken again, replaced"


async def test_a_server_that_lists_no_models(server: Server, tmp_path: Path) -> None:
    server.lists_models = False
    argv = ("--only=concurrency", "--concurrency=1")
    code, text = await sweep(server, tmp_path / "c.json", *argv, "--model=mine")
    assert code == 0, text
    assert {body["model"] for body in server.bodies} == {"mine"}
    code, text = await sweep(server, tmp_path / "c.json", *argv)
    assert code == 1
    assert "lists no model: name one with --model" in text


async def test_a_point_with_failed_requests_is_left_out(server: Server, tmp_path: Path) -> None:
    async def refuse_one(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) == BEFORE + 2 + 2 + 3:
            write_whole(writer, "429 Too Many Requests", {"error": "queue full"})
        else:
            await server.stream(body, writer)

    server.answer = refuse_one
    code, text = await sweep(server, tmp_path / "c.json", "--only=concurrency", "--concurrency=1,2,4")
    assert code == 1 and "left out, requests failed: 1 x HttpError: HTTP 429" in text
    (curve,) = curves.read(tmp_path / "c.json")
    assert [point["concurrency"] for point in curve.points] == [1, 2]


async def test_no_request_is_longer_than_the_model(server: Server, tmp_path: Path) -> None:
    server.max_model_len = 400
    code, text = await sweep(server, tmp_path / "c.json", "--concurrency=1")
    assert code == 0, text
    assert max(len(body["prompt"].split()) for body in server.bodies) == 395
    assert max(len(body["prompt"].split()) + body["max_tokens"] for body in server.bodies) <= 400
    server.bodies.clear()
    for argv, message in (
        (["--prompt-lens=399"], "--prompt-lens 399: the model's length is 400, which leaves 395"),
        (["--input-len=399"], "--input-len 399 and --output-len 4 make 403 tokens, but the model's length is 400"),
    ):
        code, text = await sweep(server, tmp_path / "c.json", *argv)
        assert code == 1 and message in text
    assert not server.bodies


async def test_a_file_that_is_not_ours_stays(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"summary": 1}')
    code, text = await sweep(server, path)
    assert code == 1 and "not a file of curves" in text and not server.bodies
    assert json.loads(path.read_text()) == {"summary": 1}


@pytest.mark.parametrize(
    ("max_model_len", "expected"),
    [
        (None, [128, 256, 512, 1024, 2048, 4096, 8192]),
        (131_072, [128, 256, 512, 1024, 2048, 4096, 8192]),
        (8192, [128, 256, 512, 1024, 2048, 4096, 8109]),
        (2100, [128, 256, 512, 1024, 2048]),
        (64, [62]),
        (2, [1]),
    ],
)
def test_default_prompt_lengths(max_model_len: int | None, expected: list[int]) -> None:
    planned = loads(SweepConfig(only="prompt-length"), max_model_len)
    assert [one.input_len for one in planned] == expected and {one.output_len for one in planned} == {1}


def test_lengths_are_known_before_anything_is_sent() -> None:
    with pytest.raises(StartupError, match="make 256 tokens, but the model's length is 255"):
        loads(SweepConfig(), 255)
