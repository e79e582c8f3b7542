"""What the gateway takes to write a streamed answer: `python -m benchmarks.gateway_stream [--passes 20]`.

Nanoseconds of processor time per token, from the outputs of a step to the bytes handed to the HTTP server, without gRPC
and sockets: for one and for 32 choices, by what the client asks for. The least of several passes is what the code
costs; to compare two trees, run them in turn.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from pagewire.config import GatewayConfig
from pagewire.gateway.app import create_app
from pagewire.gateway.core.gateway import Gateway
from pagewire.gateway.generation.reply import ChoiceDelta, PendingChoice
from pagewire.gateway.store import Store
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenLogprob

NUM_CHOICES = (1, 32)
NUM_TOKENS = 6400  # of all choices together
TEXT = " token"

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, usage": ("/v1/chat/completions", CHAT | USAGE),
    "chat, token ids": ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
    "chat, 2 logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "completion": ("/v1/completions", {"model": "m", "prompt": "hi", "stream": True}),
    "message": ("/v1/messages", CHAT | {"max_tokens": NUM_TOKENS}),
    "response": ("/v1/responses", {"model": "m", "input": "hi", "stream": True}),
}
# Of these there is always one.
WITHOUT_CHOICES = ("message", "response")


class ScriptedReply:
    """A reply whose outputs are there at once: one token of each choice per step, then how each choice ended."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.choices = [PendingChoice(request, index, self) for index, request in enumerate(requests)]  # type: ignore[arg-type]
        num_logprobs = requests[0].sampling_params.HasField("logprobs")
        entry = TokenLogprob(token=TEXT, token_bytes=TEXT.encode(), logprob=-1.5)
        logprobs = [TokenLogprob(token=TEXT, token_bytes=TEXT.encode(), logprob=-1.5, top_logprobs=[entry, entry])]
        token = (
            GenerateResponse(text=TEXT, token_ids=[1234], logprobs=logprobs)
            if num_logprobs
            else ChoiceDelta(TEXT, [1234])
        )
        indices = range(len(requests))
        self._step = [(index, token) for index in indices]
        self._last = [(index, GenerateResponse(finish_reason=common_pb2.FINISH_REASON_LENGTH)) for index in indices]
        self._steps_left = NUM_TOKENS // len(requests)

    async def next(self) -> list[Any]:
        self._steps_left -= 1
        if self._steps_left >= 0:
            return self._step
        return self._last if self._steps_left == -1 else []

    def abort(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        raise error


class ScriptedLink:
    def generate(self, requests: Sequence[GenerateRequest], *, streaming: bool) -> ScriptedReply:
        assert streaming
        return ScriptedReply(requests)


async def seconds(app: ASGIApp, path: str, body: dict[str, Any]) -> float:
    """Processor time of one streamed answer."""
    content, sent = json.dumps(body).encode(), 0
    incoming = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        return incoming.pop() if incoming else await asyncio.Future()

    async def send(message: Message) -> None:
        nonlocal sent
        sent += message.get("body", b"").count(b'index":')

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    start = time.process_time()
    await app(scope, receive, send)
    elapsed = time.process_time() - start
    if sent < NUM_TOKENS:
        raise RuntimeError(f"{sent} choices were written for {NUM_TOKENS} tokens")
    return elapsed


async def measure(num_passes: int, store: Store) -> None:
    config = GatewayConfig()
    gateway = Gateway(config, store)
    gateway.link = ScriptedLink()  # type: ignore[assignment]
    app = create_app(config, gateway)
    print(f"{'ns per token':<20}" + "".join(f"{f'{n} choices':>14}" for n in NUM_CHOICES))
    for name, (path, body) in ASKED.items():
        asked = [body] if name in WITHOUT_CHOICES else [body | {"n": n} for n in NUM_CHOICES]
        least = [min([await seconds(app, path, one) for _ in range(num_passes)]) for one in asked]
        print(f"{name:<20}" + "".join(f"{1e9 * value / NUM_TOKENS:>14.0f}" for value in least), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--passes", type=int, default=20, help="answers of each kind, of which the fastest counts")
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(parser.parse_args().passes, Store(Path(directory))))


if __name__ == "__main__":
    main()
