import asyncio
import json
import statistics
from collections.abc import AsyncIterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from pagewire.tools.bench import load, report
from pagewire.tools.bench.config import BenchConfig
from pagewire.tools.bench.request import Record
from tests.pagewire.tools.openai_server import Server, listening, run_bench, write_event, write_whole


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with listening() as server:
        yield server


async def bench(server: Server, tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any], str]:
    out = tmp_path / "out.json"
    code, text = await run_bench("serve", "--base-url", server.base_url, "--json-out", str(out), *argv)
    return code, json.loads(out.read_text()) if out.exists() else {}, text


async def test_closed_loop(server: Server, tmp_path: Path) -> None:
    all_there = asyncio.Event()

    async def four_meet(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) > 2 + 2:
            if server.in_flight == 4:
                all_there.set()
            await all_there.wait()
        await server.stream(body, writer)

    server.answer = four_meet
    argv = ["--concurrency=4", "--num-prompts=12", "--input-len=20", "--output-len=6", "--warmup=2", "--api-key=k"]
    code, result, text = await bench(server, tmp_path, *argv)
    summary = result["summary"]
    assert code == 0
    assert (summary["completed"], summary["failures"], summary["not_full_length"]) == (12, 0, 0)
    assert summary["output_tokens"] == 72 and summary["chunks_per_token"] == 1
    assert summary["prompt_tokens_min"] == summary["prompt_tokens_max"] == 20, "as the server counts"
    assert summary["model"] == "m" and len(result["requests"]) == 12
    assert 0 < summary["ttft_p50_ms"] <= summary["latency_p50_ms"]
    assert server.most_in_flight == 4 and server.connections <= 5 and "Bearer k".lower() in server.authorization
    measured = server.bodies[-12:]
    assert len(server.bodies) == 2 + 2 + 12, "two to find the length, two to warm up"
    assert len({body["prompt"] for body in measured}) == 12
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 6 for body in measured)
    assert "TTFT" in text and "12 requests, 4 at once, 20 tokens in, 6 out" in text


async def test_chat_endpoint_counts_the_template(server: Server, tmp_path: Path) -> None:
    argv = ["--endpoint=/v1/chat/completions", "--num-prompts=3", "--input-len=30", "--output-len=4", "--no-ignore-eos"]
    code, result, _ = await bench(server, tmp_path, *argv)
    assert code == 0 and result["summary"]["prompt_tokens_max"] == 30
    assert all(row["chunks"] == 4 for row in result["requests"]), "the role chunk is no token"
    assert not any("ignore_eos" in body for body in server.bodies)


async def test_open_loop(server: Server, tmp_path: Path) -> None:
    server.base_url += "/v1"
    code, result, text = await bench(server, tmp_path, "--request-rate=200", "--num-prompts=10", "--output-len=2")
    starts = [row["start"] for row in result["requests"]]
    assert code == 0 and starts == sorted(starts) and starts[-1] > 0
    assert "200 requests/s" in text


def test_arrivals() -> None:
    def gaps(**kwargs: Any) -> list[float]:
        starts = list(islice(load.starts(BenchConfig(request_rate=10, **kwargs)), 4000))
        return [b - a for a, b in pairwise(starts)]

    poisson, even = gaps(seed=1), gaps(seed=1, burstiness=100)
    assert statistics.mean(poisson) == pytest.approx(0.1, rel=0.1) == statistics.mean(even)
    assert statistics.stdev(poisson) == pytest.approx(0.1, rel=0.15)
    assert statistics.stdev(even) == pytest.approx(0.01, rel=0.15)
    assert poisson == gaps(seed=1) != gaps(seed=2)


async def test_prompts_file(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "plain.jsonl"
    rows = [{"prompt": f"p{i}", "tokens": 1 + i % 2} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [f"--prompts-file={file}", "--prompt-tokens=1", "--prompt-offset=1", "--warmup=0"]
    code, _, _ = await bench(server, tmp_path, *argv, "--num-prompts=3", "--concurrency=1", "--output-len=2")
    assert code == 0 and [body["prompt"] for body in server.bodies] == ["p2", "p4", "p6"]
    code, _, text = await bench(server, tmp_path, f"--prompts-file={file}", "--prompt-tokens=7")
    assert code == 1 and "no prompts of 7 tokens" in text


async def test_failures_are_counted_by_reason(server: Server, tmp_path: Path) -> None:
    count = 0

    async def sometimes(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            write_whole(writer, "429 Too Many Requests", {"error": {"message": "queue full"}})
        elif count % 4 == 1:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            write_event(writer, {"choices": [{"text": "w"}]})
            writer.close()
        elif count % 4 == 2:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            write_event(writer, {"error": {"message": "it broke"}})
            writer.write(b"0\r\n\r\n")
        else:
            await server.stream(body | {"max_tokens": 3}, writer)

    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "p", "tokens": 1}\n')
    server.answer = sometimes
    argv = [f"--prompts-file={file}", "--warmup=0", "--num-prompts=12", "--concurrency=1", "--output-len=4"]
    code, result, text = await bench(server, tmp_path, *argv)
    assert code == 0, "some succeeded"
    assert result["summary"]["completed"] == result["summary"]["not_full_length"] == 3
    errors = result["summary"]["errors"]
    assert sum(errors.values()) == result["summary"]["failures"] == 9
    assert any("429" in error and "queue full" in error for error in errors)
    assert "the server closed the connection" in errors and any("it broke" in error for error in errors)
    assert "3 x the server closed the connection" in text


async def test_a_refused_request_is_retried_after_the_given_delay(server: Server, tmp_path: Path) -> None:
    """Each prompt is refused twice: with milliseconds, and with a date that has passed."""
    tries: dict[str, list[float]] = {}
    now = asyncio.get_running_loop().time

    async def refuse_twice(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        times = tries.setdefault(body["prompt"], [])
        times.append(now())
        if len(times) == 1:
            write_whole(writer, "429 Too Many Requests", {}, {"Retry-After": "9", "Retry-After-Ms": "60"})
        elif len(times) == 2:
            write_whole(writer, "503 Service Unavailable", {}, {"Retry-After": "Mon, 23 Nov 2020 10:00:00 GMT"})
        else:
            await server.stream(body, writer)

    file = tmp_path / "plain.jsonl"
    file.write_text("".join(f'{{"prompt": "p{i}", "tokens": 1}}\n' for i in range(3)))
    server.answer = refuse_twice
    argv = [f"--prompts-file={file}", "--warmup=0", "--num-prompts=3", "--output-len=2"]
    code, result, text = await bench(server, tmp_path, *argv, "--max-retries=2")
    summary = result["summary"]
    assert code == 0 and (summary["completed"], summary["retries"]) == (3, 6) and "6 retries" in text
    assert all(times[1] - times[0] > 0.05 for times in tries.values()), "not before the time"
    assert 0.05 < summary["waited_max_s"] < 9
    assert all(row["start"] >= row["waited"] >= 0.05 and row["retries"] == 2 for row in result["requests"])
    tries.clear()
    code, result, _ = await bench(server, tmp_path, *argv, "--max-retries=1")
    assert code == 1 and all("503" in error for error in result["summary"]["errors"])


async def test_a_server_that_asks_for_a_key(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "k"
    code, _, text = await bench(server, tmp_path, "--num-prompts=2", "--api-key=another")
    assert code == 1 and "set PAGEWIRE_API_KEY to its key" in text and "running" not in text
    monkeypatch.setenv("PAGEWIRE_API_KEY", "k")
    code, result, _ = await bench(server, tmp_path, "--num-prompts=2")
    assert code == 0 and result["summary"]["completed"] == 2


async def test_all_failed_exits_with_1(server: Server, tmp_path: Path) -> None:
    async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        write_whole(writer, "503 Service Unavailable", {"error": "away"})

    file = tmp_path / "plain.jsonl"
    file.write_text('{"prompt": "p", "tokens": 1}\n')
    server.answer = refuse
    code, result, _ = await bench(server, tmp_path, f"--prompts-file={file}", "--warmup=0", "--num-prompts=2")
    assert code == 1 and result["summary"]["failures"] == 2
    code, _, text = await bench(server, tmp_path, "--num-prompts=2")
    assert code == 1 and "before the measurement failed" in text and "503" in text


def test_percentiles_interpolate() -> None:
    assert report.percentile([], 50) is None
    assert report.percentile([3.0], 99) == 3.0
    assert report.percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert report.percentile(list(range(101)), 99) == 99


def test_throughput_counts_from_first_start_to_last_end() -> None:
    records = [
        Record(start=10.0, end=12.0, ttft=0.5, tpot=0.1, completion_tokens=8, chunks=8),
        Record(start=11.0, end=14.0, ttft=1.5, tpot=0.3, completion_tokens=8, chunks=4),
    ]
    summary = report.summarise(BenchConfig(output_len=8), "m", records, 0.0)
    assert summary["wall_s"] == 4 and summary["output_tok_per_s"] == 4 and summary["req_per_s"] == 0.5
    assert summary["ttft_p50_ms"] == 1000 and summary["tpot_p50_ms"] == 200 and summary["chunks_per_token"] == 0.75
