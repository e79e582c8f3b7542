"""The Python client and the commands built on it, against a small InferenceService."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.client import Client
from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError

REPOSITORY = Path(__file__).parents[2]


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with the words of the prompt, or with how the conversation looks; "forever" never ends."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        self.requests.append(request)
        kind = request.WhichOneof("prompt")
        if kind == "chat":
            text = " ".join(f"{m.role}:{m.content}" for m in request.chat.messages)
        else:
            text = request.text if kind == "text" else str(list(request.token_ids.ids))
        if "refuse" in text:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "refused, as asked")
        for word in text.split():
            yield inference_pb2.GenerateResponse(text=f"{word} ")
        if "forever" in text:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        yield inference_pb2.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_STOP)

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text), int(request.add_special_tokens)])

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=str(list(request.token_ids)))

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="echo")])


@pytest.fixture
async def echo(tmp_path: Path) -> AsyncIterator[tuple[Echo, str]]:
    address = f"unix:{tmp_path}/echo.sock"
    servicer = Echo()
    server = rpc.Server([address])
    name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    server.add(servicer, inference_pb2_grpc.add_InferenceServiceServicer_to_server, name)
    await server.start()
    yield servicer, address
    await server.stop()


async def run(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pagewire.cli",
        *argv,
        cwd=REPOSITORY,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_client_takes_text_tokens_and_messages(echo: tuple[Echo, str]) -> None:
    servicer, address = echo
    async with Client(address) as client:

        async def text(prompt: Any, **params: Any) -> str:
            return "".join([response.text async for response in client.generate(prompt, **params)])

        assert await text("one two", max_tokens=3, temperature=0, seed=None, stop=["x"]) == "one two "
        assert await text([1, 2], bad_words=["x"], truncate_prompt_tokens=-1, cache_salt="mine") == "[1, 2] "
        assert await text([{"role": "user", "content": "hi"}]) == "user:hi "
        params = servicer.requests[0].sampling_params
        assert (params.max_tokens, params.temperature, params.HasField("seed")) == (3, 0, False)
        assert params.HasField("temperature") and list(servicer.requests[0].stop) == ["x"]
        plain, asked = servicer.requests[:2]
        assert not plain.HasField("truncate_prompt_tokens")
        assert (list(asked.bad_words), asked.truncate_prompt_tokens, asked.cache_salt) == (["x"], -1, "mine")
        assert await client.tokenize("abc") == [3, 1]
        assert await client.detokenize([4, 5]) == "[4, 5]"
        assert [model.id for model in await client.models()] == ["echo"]


async def test_client_raises_statuses(echo: tuple[Echo, str]) -> None:
    async with Client(echo[1]) as client:
        with pytest.raises(RpcError, match="refused, as asked") as error:
            await anext(client.generate("refuse"))
        assert error.value.code == grpc.StatusCode.INVALID_ARGUMENT
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(RpcError) as error:
            await client.models()
        assert error.value.code == grpc.StatusCode.UNAVAILABLE


async def test_leaving_the_iteration_aborts(echo: tuple[Echo, str]) -> None:
    servicer, address = echo
    async with Client(address) as client:
        responses = client.generate("forever")
        await anext(responses)
        await responses.aclose()
        await asyncio.wait_for(servicer.cancelled.wait(), 30)


async def test_generate_prints_the_text(echo: tuple[Echo, str]) -> None:
    servicer, address = echo
    assert await run("generate", "one two", "--address", address, "--max-tokens=5") == (0, "one two \n", "")
    assert servicer.requests[0].sampling_params.max_tokens == 5
    assert (await run("generate", f"--address={address}", stdin=b"from a pipe"))[1] == "from a pipe \n"
    assert (await run("generate", "--chat", "hi", f"--address={address}"))[1] == "user:hi \n"
    code, _, err = await run("generate", f"--address={address}", stdin=b"\xff\xfe")
    assert code == 1 and "not valid UTF-8" in err and "Traceback" not in err
    for flag in ("--max-tokens=99999999999", f"--seed={2**63}"):
        code, _, err = await run("generate", "one", flag, f"--address={address}")
        assert code == 2 and "at most" in err
    code, _, err = await run("generate", "refuse", "--address", address)
    assert code == 1 and "refused, as asked (INVALID_ARGUMENT)" in err and "Traceback" not in err


async def test_messages_take_images(echo: tuple[Echo, str], tmp_path: Path) -> None:
    """Files and URLs, and parts as OpenAI writes them."""
    servicer, address = echo
    file = tmp_path / "a.jpeg"
    file.write_bytes(b"pixels")
    openai = [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ["what is", file, {"image": "https://host/a.png"}, {"image": file}]},
        {"role": "user", "content": openai, "name": "Ada"},
        {"role": "user", "content": "hello"},
    ]
    async with Client(address) as client:
        async for _ in client.generate(messages):
            pass
        with pytest.raises(ValueError, match="a part of a message must be a str, a Path"):
            async for _ in client.generate([{"role": "user", "content": [{"audio": 1}]}]):
                pass
        with pytest.raises(FileNotFoundError):
            async for _ in client.generate([{"role": "user", "content": [tmp_path / "none.png"]}]):
                pass
    [request] = servicer.requests
    sent = "data:image/jpeg;base64,cGl4ZWxz"
    parts = [[part.text or part.image.url for part in message.parts] for message in request.chat.messages]
    assert parts == [["what is", sent, "https://host/a.png", sent], ["b", "data:,x"], []]
    assert request.chat.messages[1].name == "Ada" and request.chat.messages[2].content == "hello"


async def test_chat_through_a_pipe_keeps_and_forgets_history(echo: tuple[Echo, str]) -> None:
    lines = b"one\ntwo\n/what\n/reset\nthree\n/exit\nnever\n"
    code, out, _ = await run("chat", "--address", echo[1], "--system=be brief", stdin=lines)
    assert code == 0
    answers = out.splitlines()
    assert answers[0] == "system:be brief user:one "
    assert answers[1] == "system:be brief user:one assistant:system:be brief user:one user:two "
    assert answers[2].startswith("unknown command /what")
    assert answers[3:] == ["system:be brief user:three "]


@pytest.mark.skipif(sys.platform != "linux", reason="talks to a pseudo terminal")
async def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(echo: tuple[Echo, str]) -> None:
    servicer, address = echo
    terminal, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pagewire.cli",
        "chat",
        "--address",
        address,
        cwd=REPOSITORY,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""

    async def wait_for(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += await asyncio.wait_for(asyncio.to_thread(os.read, terminal, 4096), 60)
        shown = shown.partition(text)[2]

    try:
        await wait_for(b"> ")
        os.write(terminal, b"forever\n")
        await wait_for(b"user:forever ")
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(servicer.cancelled.wait(), 30)
        await wait_for(b"> ")
        os.write(terminal, b"/reset\n")
        await wait_for(b"> ")
        os.write(terminal, b"again\n")
        await wait_for(b"user:again")
        await wait_for(b"> ")
        os.write(terminal, b"\x04")
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(terminal)


async def test_chats_take_tools_and_past_calls_as_openai_writes_them(echo: tuple[Echo, str]) -> None:
    servicer, address = echo
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    async with Client(address) as client:
        options: dict[str, Any] = {"tools": tools, "tool_choice": "required", "chat_template_kwargs": {"a": 1}}
        async for _ in client.generate(messages, reasoning=True, include_stop_str_in_output=True, **options):
            pass
        wrong: dict[str, Any] = {"max_tokns": 1}
        with pytest.raises(ValueError, match="tools: only chats have it"):
            await anext(client.generate("text", tools=tools))
        with pytest.raises(ValueError, match="tool_choice 'required' needs tools"):
            await anext(client.generate(messages, tool_choice="required"))
        with pytest.raises(TypeError, match="unknown option max_tokns; known are"):
            await anext(client.generate("text", **wrong))
    [request] = servicer.requests
    assert request.chat.tools[0].parameters_json == '{"type": "object"}' and request.output_parsing.required
    assert request.output_parsing.reasoning and request.include_stop_str_in_output
    past = request.chat.messages[1]
    assert (past.tool_calls[0].name, past.HasField("content")) == ("f", False)
    assert request.chat.messages[2].tool_call_id == "c1" and request.chat.chat_template_kwargs_json == '{"a": 1}'
