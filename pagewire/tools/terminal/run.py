"""`pagewire run MODEL`: a conversation with a model, on a running stack that serves it or on a new one."""

import asyncio
import contextlib
import dataclasses
import os
import stat
import sys
import time
from collections.abc import Iterator

from pagewire import flags
from pagewire.config import SET_BY_STACK, WITHOUT_TLS, ServeConfig
from pagewire.config.fields import flag
from pagewire.errors import StartupError
from pagewire.files.models import default_served_name, is_of_hub, resolve_model
from pagewire.stack.own_stack import OwnStack
from pagewire.stack.running import running_stacks, stack_that_serves
from pagewire.tools.client_config import ChatConfig, SamplingFlags
from pagewire.tools.generate import valid_text
from pagewire.tools.served.served import CLEAR, Served
from pagewire.tools.served.stack_lines import READY, has_name
from pagewire.tools.terminal.chat import answer_once, chat
from pagewire.tools.terminal.stacks import models_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(SamplingFlags, ServeConfig):
    """All flags of the stack, and those of a chat."""

    prompt: str | None = flag(None, "answer this and end (default: a conversation)", group="generation")
    system: str | None = flag(None, "system message that opens the conversation", group="generation")
    log_level: str = flag(
        "warning",
        "least severe level to log",
        group="observability",
        choices=("debug", "info", "warning", "error"),
    )


_OWN_FLAGS = frozenset({"prompt", "system", "log_level", "model"} | {f.name for f in dataclasses.fields(SamplingFlags)})
# Flags of ports and storage: a stack that ends with the conversation needs neither.
_NOT_OFFERED = (
    *SET_BY_STACK,
    "host",
    "port",
    "grpc_port",
    "api_server_count",
    "uds_dir",
    "api_key",
    "api_key_file",
    *WITHOUT_TLS,
    "data_dir",
    "batch_concurrency",
    "max_file_bytes",
    "file_store_size",
)


def main(argv: list[str]) -> int:
    """Runs the command, and returns the exit code. Raises StartupError."""
    config = flags.parse(
        RunConfig,
        argv,
        prog="pagewire run",
        description="A conversation with MODEL in the terminal, or the answer to PROMPT and piped input. A running"
        " stack that has MODEL answers, and loads or wakes it, if no flags of the stack are given; otherwise a new"
        " stack, which ends with it.",
        positional=("model", "prompt"),
        without=_NOT_OFFERED,
    )
    question = _question(config.prompt)
    served = asyncio.run(_running(config))
    with contextlib.ExitStack() as resources:
        address = resources.enter_context(_stack(config)) if served is None else asyncio.run(served.ready())
        sampling = {field.name: getattr(config, field.name) for field in dataclasses.fields(SamplingFlags)}
        settings = ChatConfig(address=address, system=config.system, **sampling)

        async def before() -> None:
            if served is not None:
                await served.ready()

        return asyncio.run(chat(settings, before) if question is None else answer_once(settings, question))


def _question(prompt: str | None) -> str | None:
    """Returns PROMPT with the standard input if that is a file or a pipe; None for a conversation."""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    piped = valid_text(sys.stdin.read) if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""
    texts = [text for text in (prompt, piped.strip()) if text]
    if not texts and not sys.stdin.isatty():
        raise StartupError("nothing to answer: name a prompt, pipe one in, or use a terminal for a conversation")
    return valid_text(lambda: "\n\n".join(texts)) if texts else None


@contextlib.contextmanager
def _stack(config: RunConfig) -> Iterator[str]:
    """Yields the address of a new stack that serves the model. Raises StartupError."""
    started = time.monotonic()
    terminal = sys.stderr.isatty()
    if terminal:
        print(f"starting {default_served_name(config.model)} ...", end="", file=sys.stderr, flush=True)
    clear = CLEAR if terminal else ""

    def echo(line: str) -> None:
        print(f"{clear}{line}", file=sys.stderr, flush=True)

    serve = {field.name: getattr(config, field.name) for field in dataclasses.fields(ServeConfig)}
    with contextlib.closing(OwnStack(ServeConfig(**serve | {"port": 0, "grpc_port": 0}), echo)) as stack:
        try:
            stack.await_ready()
        finally:
            print(clear, end="", file=sys.stderr, flush=True)
        if terminal:
            print(f"started in {time.monotonic() - started:.1f} s, REST at {stack.rest}/v1", file=sys.stderr)
        yield stack.grpc


async def _running(config: RunConfig) -> Served | None:
    """Returns a running stack that has the model, if possible one in which it serves, unless flags of a stack are
    given."""
    for field in dataclasses.fields(ServeConfig):
        if field.name not in _OWN_FLAGS and getattr(config, field.name) != field.default:
            return None
    listed = await models_of([stack for stack in running_stacks() if stack.shared])
    named = [(stack, line) for stack, lines, _ in listed for line in lines if has_name(line, config.model)]
    if named:
        stack, line = min(named, key=lambda found: found[1].state != READY)
        return Served(stack, line.name)
    # A hub id is not looked up, which might need the network.
    files = None if is_of_hub(config.model) else resolve_model(config.model, accepted_license=config.accept_license)
    one = stack_that_serves(config.model, files)
    return None if one is None else Served(one, one.names[0] if one.lines else "")
