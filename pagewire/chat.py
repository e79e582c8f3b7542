"""`pagewire chat`: a conversation with a running stack in the terminal."""

import asyncio
import contextlib
import signal
import sys

from pagewire.client import Client
from pagewire.client_config import ChatConfig
from pagewire.generate import explain, options, valid_text
from pagewire.rpc import RpcError

_COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."

Message = dict[str, str]


async def chat(config: ChatConfig) -> int:
    """Reads questions from the terminal, or one per line from a pipe, until the end. The exit code."""
    opening: list[Message] = [{"role": "system", "content": config.system}] if config.system else []
    messages = list(opening)
    # Not asyncio's handler, which would only cancel us once input() returns.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    async with Client(config.address) as client:
        try:
            models = await client.models()
            if sys.stdin.isatty():
                print(f"{config.model or models[0].id} at {config.address}. {_COMMANDS}")
            while (question := _read_question()) is not None:
                if question == "/exit":
                    break
                if question == "/reset":
                    messages = list(opening)
                elif question.startswith("/"):
                    print(f"unknown command {question.split()[0]}: {_COMMANDS}")
                elif question:
                    messages.append({"role": "user", "content": question})
                    messages.append({"role": "assistant", "content": await _answer(client, messages, config)})
        except RpcError as error:
            raise explain(error, config) from error
    return 0


def _read_question() -> str | None:
    """One line; None at the end of the input. Blocks the event loop, which has nothing else to do meanwhile."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() line editing and history
    try:
        return valid_text(lambda: input(prompt)).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(f"\n{_COMMANDS}")
        return ""


async def _answer(client: Client, messages: list[Message], config: ChatConfig) -> str:
    """Prints the answer while it comes, until its end or Ctrl-C. What was printed."""
    pieces: list[str] = []

    async def stream() -> None:
        async for response in client.generate(messages, **options(config)):
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
        print()
    return "".join(pieces)
