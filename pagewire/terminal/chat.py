"""`pagewire chat`: a conversation with a running stack in the terminal."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, replace

import grpc

from pagewire.address import grpc_address
from pagewire.client import Client
from pagewire.client_config import ChatConfig
from pagewire.errors import StartupError
from pagewire.generate import explain, options
from pagewire.rpc import RpcError
from pagewire.terminal.conversation import CommandError, Conversation, chat_defaults
from pagewire.terminal.line_input import editing, read_message
from pagewire.v1 import inference_pb2

_HINT = "/help lists commands, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


async def chat(config: ChatConfig) -> int:
    """Reads questions from the terminal, or one per line from a pipe, until the end. The exit code."""
    config = replace(config, address=grpc_address(config.address))
    async with Client(config.address) as client:
        try:
            return await _Chat(client, config, await _model(client, config)).run()
        except RpcError as error:
            raise explain(error, config) from error


async def answer_once(config: ChatConfig, question: str) -> int:
    """Prints the answer to one question. The exit code."""
    async with Client(config.address) as client:
        try:
            chat = _Chat(client, config, await _model(client, config))
            await chat.answer(question)
        except RpcError as error:
            raise explain(error, config) from error
    return 0


async def _model(client: Client, config: ChatConfig) -> inference_pb2.Model:
    """The one that is talked to. Raises StartupError for one that does not talk."""
    models = await client.models()
    names = [model.id for model in models]
    if config.model and config.model not in names:
        raise StartupError(f"{config.address} does not serve {config.model}; --model takes {', '.join(names)}")
    return models[names.index(config.model) if config.model else 0]


@dataclass(frozen=True)
class _Answer:
    text: str
    num_tokens: int
    first_s: float  # from the question to the first piece
    rest_s: float  # from there to the end

    def summary(self) -> str:
        rate = f"{(self.num_tokens - 1) / self.rest_s:.1f} tokens/s, " if self.num_tokens > 1 and self.rest_s else ""
        return f"{self.num_tokens} tokens, {rate}the first after {self.first_s:.2f} s"


class _Chat:
    def __init__(self, client: Client, config: ChatConfig, model: inference_pb2.Model) -> None:
        given = {name: value for name, value in options(config).items() if name != "model" and value is not None}
        self._client = client
        self._config = config
        self._model = model
        self._conversation = Conversation(config.system, given, chat_defaults(model))
        self._terminal = sys.stdin.isatty()

    async def run(self) -> int:
        if self._terminal:
            print(f"{self._model.id} at {self._config.address}. {_HINT}")
        # Not asyncio's handler, which would only cancel us once input() returns.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with editing():
            while True:
                try:
                    message = read_message("> " if self._terminal else "")
                except KeyboardInterrupt:
                    print(f"\n{_HINT}")
                    continue
                if message is None or message in ("/exit", "/bye"):
                    return 0
                if message.startswith("/"):
                    self._command(message)
                elif message:
                    await self._turn(message)

    def _command(self, line: str) -> None:
        try:
            told = self._conversation.command(line)
        except CommandError as error:
            told = str(error)
        if told:
            print(told)

    async def _turn(self, question: str) -> None:
        try:
            answer = await self.answer(question)
        except RpcError as error:
            # The conversation is as it was; only a stack that is gone ends the program.
            if error.code == grpc.StatusCode.UNAVAILABLE or not self._terminal:
                raise
            print(f"{error.message} ({error.code.name}). /clear forgets the conversation, /set shows the settings.")
            return
        if self._terminal and answer.num_tokens:
            print(_dim(answer.summary()))

    async def answer(self, question: str) -> _Answer:
        """Prints it while it comes, until its end or Ctrl-C, and adds both to the conversation. Raises RpcError."""
        pieces: list[str] = []
        num_tokens, asked = 0, time.monotonic()
        first = None
        messages = [*self._conversation.messages, {"role": "user", "content": question}]

        async def stream() -> None:
            nonlocal num_tokens, first
            params = self._conversation.sampling_params
            async for response in self._client.generate(messages, model=self._config.model, **params):
                first = first or time.monotonic()
                num_tokens += len(response.token_ids)
                pieces.append(response.text)
                print(response.text, end="", flush=True)

        task = asyncio.create_task(stream())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if pieces or not self._terminal:
                print()
        text = "".join(pieces)
        self._conversation.turns += [messages[-1], {"role": "assistant", "content": text}]
        ended = time.monotonic()
        return _Answer(text, num_tokens, (first or ended) - asked, ended - (first or ended))


def _dim(text: str) -> str:
    return text if os.environ.get("NO_COLOR") else f"\x1b[2m{text}\x1b[0m"
