"""A server for the tests of `pagewire bench`, and the command itself as a process."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class Server:
    """An OpenAI-compatible server of one word per token, on bare HTTP/1.1; `answer` may be replaced."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.authorization: set[str] = set()
        self.connections = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.answer: Answer = self.stream
        self.base_url = ""
        self.max_model_len: int | None = None
        self.lists_models = True
        self.key = ""  # that requests need
        self.metrics = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                self.authorization.add(headers.get("authorization", ""))
                content = await reader.readexactly(int(headers["content-length"]))
                if self.key and headers.get("authorization") != f"bearer {self.key}":
                    write_whole(writer, "401 Unauthorized", {})
                    continue
                if head.startswith("GET /v1/models") and not self.lists_models:
                    write_whole(writer, "404 Not Found", {})
                    continue
                if head.startswith("GET /metrics"):
                    page = self.metrics.encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
                    continue
                if head.startswith("GET /v1/models"):
                    write_whole(writer, "200 OK", {"data": [{"id": "m", "max_model_len": self.max_model_len}]})
                    continue
                self.bodies.append(json.loads(content) | {"path": head.split()[1]})
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    await self.answer(self.bodies[-1], writer)
                finally:
                    self.in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        chat = body["path"] == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        overhead = 10 if chat else 0
        count = body["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if chat:
            write_event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(count):
            end = {"finish_reason": "length" if i == count - 1 else None}
            write_event(writer, {"choices": [{"delta": {"content": "w"}, **end} if chat else {"text": "w", **end}]})
            await asyncio.sleep(0)
        usage = {"prompt_tokens": len(prompt.split()) + overhead, "completion_tokens": count}
        write_event(writer, {"choices": [], "usage": usage})
        write_event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")


def write_event(writer: asyncio.StreamWriter, event: dict[str, Any] | str) -> None:
    data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
    # Chunk borders need not be event borders.
    for piece in (data[:7], data[7:]):
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")


def write_whole(
    writer: asyncio.StreamWriter, status: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    data = json.dumps(body).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"HTTP/1.1 {status}\r\n{lines}Content-Length: {len(data)}\r\n\r\n".encode() + data)


@asynccontextmanager
async def listening() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.base_url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield server
    listener.close()


async def run_bench(*argv: str) -> tuple[int, str]:
    """Exit code and output of `pagewire bench`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pagewire.cli",
        "bench",
        *argv,
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    text, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, text.decode()
