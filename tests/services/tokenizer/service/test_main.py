"""The service as the process that operators start."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.config import TokenizerConfig
from pagewire.errors import StartupError
from pagewire.services.tokenizer.main import load_pool, served_names
from pagewire.v1 import inference_pb2
from pagewire.wire import rpc
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

SERVICE = "pagewire.v1.InferenceService"


async def start(line: TokenizerLine, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from pagewire.cli import main; main()",
        "tokenizer", line.config.model, "--listen", line.config.listen,
        "--scheduler-address", line.config.scheduler_address, *flags,
        cwd=Path(__file__).parents[4], env={"PATH": os.environ["PATH"]}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def until_ready(line: TokenizerLine, ready: bool = True) -> None:
    serving = health_pb2.HealthCheckResponse
    status = serving.SERVING if ready else serving.NOT_SERVING
    async with rpc.channel(line.config.listen) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        async for answer in stub.Watch(request, wait_for_ready=True, timeout=30):
            if answer.status == status:
                return


@pytest.mark.parametrize("pool_type", ["thread", "process"])
async def test_serves_until_sigterm_and_lets_requests_end(tmp_path: Path, pool_type: str) -> None:
    model = save_byte_level(tmp_path / "model")
    (model / "config.json").write_text("{}")
    scheduler = FakeScheduler(lambda request: [50, 51, 52, 53, EOS], auto=False)
    line = TokenizerLine(tmp_path, scheduler, model)
    process = await start(line, "--tokenizer-pool-type", pool_type, "--tokenizer-pool-size", "1")
    try:
        async with grpc.aio.insecure_channel(line.config.listen) as channel:
            await until_ready(line, False)
            await line.start_scheduler()
            await until_ready(line)
            generate = channel.unary_stream(
                f"/{SERVICE}/Generate",
                request_serializer=inference_pb2.GenerateRequest.SerializeToString,
                response_deserializer=inference_pb2.GenerateResponse.FromString,
            )
            call = generate(inference_pb2.GenerateRequest(text="Hello"))
            await scheduler.until(lambda: scheduler.num_running == 1)
            process.send_signal(signal.SIGTERM)
            scheduler.auto = True
            scheduler.step()
            responses = [response async for response in call]
            assert [token for response in responses for token in response.token_ids] == [50, 51, 52, 53, EOS]
        assert await asyncio.wait_for(process.wait(), 30) == 0, (await process.stderr.read()).decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await line.kill_scheduler()


async def test_what_cannot_be_loaded_is_said_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    line = TokenizerLine(tmp_path, FakeScheduler(lambda request: []), tmp_path / "broken.gguf")
    process = await start(line)
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "broken.gguf: GGUF version 0 is not supported" in stderr.decode()
    assert "Traceback" not in stderr.decode()


def test_flags_that_make_no_sense_are_named(tmp_path: Path) -> None:
    model = str(save_byte_level(tmp_path))
    with pytest.raises(StartupError, match="--tokenizer-pool-size"):
        load_pool(TokenizerConfig(tokenizer=model, tokenizer_pool_size=0))
    with pytest.raises(StartupError, match="--chat-template"):
        load_pool(TokenizerConfig(tokenizer=model, chat_template="nowhere.jinja"))
    with pytest.raises(StartupError, match="--served-model-name"):
        served_names(TokenizerConfig(served_model_name=" , "))


def test_chat_template_override(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    pool = load_pool(TokenizerConfig(tokenizer=str(save_byte_level(tmp_path)), chat_template=template))
    pool.close()
    assert pool.codec.chat_template == template
