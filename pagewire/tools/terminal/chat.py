"""`pagewire chat`: a conversation with a running stack in the terminal."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from google.protobuf.json_format import MessageToDict

from pagewire.client import Client
from pagewire.errors import StartupError
from pagewire.tools.client_config import ChatConfig
from pagewire.tools.generate import connected, explain, options, reached
from pagewire.tools.terminal.context import longest_answer, make_room
from pagewire.tools.terminal.conversation import CommandError, Conversation, chat_defaults
from pagewire.tools.terminal.line_input import editing, read_message
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError

_HINT = "/help lists commands, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


# Makes the model ready before a question, if it may have been taken out of memory since the last one.
Before = Callable[[], Awaitable[object]]


async def chat(config: ChatConfig, before: Before | None = None) -> int:
    """Answers questions from the terminal, or one per line from a pipe, until the end. Returns the exit code."""
    config, served = await reached(config)
    async with connected(config) as client:
        try:
            if served is not None:
                before = served.ready
            return await _Chat(client, config, await _model(client, config), before).run()
        except RpcError as error:
            raise explain(error, config) from error


async def answer_once(config: ChatConfig, question: str) -> int:
    """Prints the answer to one question. Returns the exit code."""
    async with connected(config) as client:
        try:
            answer = await _Chat(client, config, await _model(client, config)).answer(question)
        except RpcError as error:
            raise explain(error, config) from error
    if answer.at_limit:
        print(f"The answer was cut off after {answer.limit} tokens; --max-tokens N allows more.", file=sys.stderr)
    return 130 if answer.stopped else 0


async def _model(client: Client, config: ChatConfig) -> inference_pb2.Model:
    """Returns the model of the chat. Raises StartupError for one that cannot chat."""
    models = await client.models()
    names = [model.id for model in models]
    if config.model and config.model not in names:
        raise StartupError(f"{config.address} does not serve {config.model}; --model takes {', '.join(names)}")
    return models[names.index(config.model) if config.model else 0]


@dataclass
class _Answer:
    """The state of an answer. stopped: by Ctrl-C. is_cut: its tokens ran out before its end. limit: max_tokens."""

    asked: float  # this and the following times: seconds of the monotonic clock
    first: float | None = None
    ended: float = 0.0
    text: str = ""
    num_tokens: int = 0
    is_cut: bool = False
    limit: int | None = None
    stopped: bool = False

    @property
    def at_limit(self) -> bool:
        return self.is_cut and self.num_tokens == self.limit

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        self.first = self.first or time.monotonic()
        self.text += response.text
        self.num_tokens += len(response.token_ids)
        self.is_cut = response.finish_reason == common_pb2.FINISH_REASON_LENGTH

    def summary(self) -> str:
        first = self.first or self.ended
        seconds = self.ended - first
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.num_tokens > 1 and seconds:
            parts.append(f"{(self.num_tokens - 1) / seconds:.1f} tokens/s")
        parts.append(f"the first after {first - self.asked:.2f} s")
        if self.is_cut:
            parts.append(f"cut off by max_tokens: {self.limit}" if self.at_limit else "the model's length is reached")
        return ", ".join(parts)


class _Chat:
    def __init__(
        self, client: Client, config: ChatConfig, model: inference_pb2.Model, before: Before | None = None
    ) -> None:
        given = {name: value for name, value in options(config).items() if name != "model" and value is not None}
        self._client = client
        self._config = config
        self._model = model
        self._before = before
        of_server = MessageToDict(model.default_sampling_params, preserving_proto_field_name=True)
        self._conversation = Conversation(config.system, given, chat_defaults(model), of_server)
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()

    async def run(self) -> int:
        if self._terminal:
            print(f"{self._model.id} at {self._config.address}. {_HINT}")
        # Not asyncio's handler, which would only cancel this task once input() returns.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with editing():
            while True:
                try:
                    message = read_message("> " if self._terminal else "")
                except KeyboardInterrupt:
                    print(f"\n{_HINT}")
                    continue
                if message is None or message in ("/exit", "/bye"):
                    if message is None and self._terminal:
                        print()  # so that the shell's prompt begins a new line
                    return 0
                if message.startswith("/"):
                    self._command(message)
                elif message:
                    await self._turn(message)

    def _command(self, line: str) -> None:
        try:
            reply = self._conversation.command(line)
        except CommandError as error:
            reply = str(error)
        if reply:
            print(reply)

    async def _turn(self, question: str) -> None:
        try:
            if self._before is not None:
                await self._before()
            await self._make_room(question)
            answer = await self.answer(question)
        except (RpcError, StartupError) as error:
            if not self._terminal:
                raise
            # The conversation is unchanged, and can continue or be saved.
            print(self._explanation(error) if isinstance(error, RpcError) else error)
            return
        if self._terminal and answer.num_tokens:
            print(_dim(answer.summary()))

    def _explanation(self, error: RpcError) -> str:
        if error.code == grpc.StatusCode.UNAVAILABLE:
            return f"{explain(error, self._config)}. Ask again once it is back; /save FILE keeps the conversation."
        return f"{error.message} ({error.code.name}). /clear forgets the conversation, /set shows the settings."

    async def _make_room(self, question: str) -> None:
        left_out = await make_room(self._client, self._model, self._conversation, question)
        if left_out and self._terminal:
            print(
                _dim(
                    f"The model takes {self._model.max_model_len} tokens: the oldest {self._conversation.first}"
                    " messages are no longer sent. /clear starts over."
                )
            )

    async def answer(self, question: str) -> _Answer:
        """Prints an answer while it is generated, until its end or Ctrl-C, and adds question and answer to the
        conversation. Raises RpcError."""
        answer = _Answer(time.monotonic())

        async def stream() -> None:
            params = self._conversation.sampling_params
            if "max_tokens" not in params:
                most = await longest_answer(self._client, self._model, self._conversation, question)
                params = params if most is None else {**params, "max_tokens": most}
            answer.limit = params.get("max_tokens")
            messages = self._conversation.asking(question)
            async for response in self._client.generate(messages, model=self._config.model, **params):
                answer.add(response)
                print(response.text, end="", flush=True)

        task = asyncio.create_task(stream())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            await asyncio.wait({task})
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if answer.text or not self._terminal:
                print()
        answer.ended, answer.stopped = time.monotonic(), task.cancelled()
        if not task.cancelled():
            task.result()
        if answer.text:
            self._conversation.add(question, answer.text)
        return answer


def _dim(text: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"
