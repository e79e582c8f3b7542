"""A line of a batch that ends its gateway, which a supervisor starts again: all other lines are answered."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import httpx

from pagewire.config import GatewayConfig
from pagewire.process.supervisor import Service, Supervisor
from pagewire.stack.launch import http_ready
from tests.e2e.line import free_port
from tests.gateway.batches.test_batches import ENDED, chat, jsonl
from tests.gateway.conftest import plain_http
from tests.gateway.fake_tokenizer import FakeTokenizer

# A gateway that hangs over a body with this word, as it might over an unforeseen one.
GATEWAY = """
import time
from pagewire.cli import main
from pagewire.gateway.core.reading import json_route
parse_json = json_route.parse_json
async def parse(content):
    if b"DEADLY" in content:
        time.sleep(600)
    return await parse_json(content)
json_route.parse_json = parse
main()
"""
PATIENCE_S = 100.0  # for three starts of the gateway


async def answered(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """Asks until a gateway answers."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                answer = await ask()
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            assert answer.status_code == 200, answer.text
            return answer


async def test_a_line_that_ends_two_gateways_is_answered_with_an_error(
    fake: FakeTokenizer, address: str, tmp_path: Path
) -> None:
    config = GatewayConfig(port=free_port(), tokenizer_address=address, data_dir=str(tmp_path / "data"))
    flags = ["--port", str(config.port), "--tokenizer-address", address, "--data-dir", str(config.data_dir)]
    command = [sys.executable, "-c", GATEWAY, "gateway", *flags, "--hang-timeout", "1", "--log-level", "warning"]
    service = Service("gateway", command, partial(http_ready, config), dict(os.environ))
    supervisor = Supervisor([service], shutdown_timeout=5, takes_signals=False)
    running = asyncio.create_task(supervisor.run(lambda: None))
    lines = [chat(0), chat(1, messages=[{"role": "user", "content": "DEADLY"}]), chat(2), chat(3)]
    try:
        async with plain_http(f"http://127.0.0.1:{config.port}") as client:
            form = {"files": {"file": ("in.jsonl", jsonl(lines))}, "data": {"purpose": "batch"}}
            file = (await answered(lambda: client.post("/v1/files", **form))).json()  # type: ignore[arg-type]
            body = {"input_file_id": file["id"], "endpoint": lines[0]["url"], "completion_window": "24h"}
            batch = (await answered(lambda: client.post("/v1/batches", json=body))).json()
            path = f"/v1/batches/{batch['id']}"
            async with asyncio.timeout(PATIENCE_S):
                while batch["status"] not in ENDED:
                    await asyncio.sleep(0.1)
                    batch = (await answered(lambda: client.get(path))).json()
            counts = {"total": 4, "completed": 3, "failed": 1}
            assert (batch["status"], batch["request_counts"]) == ("completed", counts)
            path = f"/v1/files/{batch['error_file_id']}/content"
            (refused,) = map(json.loads, (await answered(lambda: client.get(path))).text.splitlines())
            assert refused["custom_id"] == "q1"
            assert refused["response"]["body"]["error"]["code"] == "gateway_died"
    finally:
        supervisor.stop()
        await running
