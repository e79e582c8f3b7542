"""`pagewire ps` and `stop`: the stacks that run on this machine, and their models."""

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire import flags
from pagewire.config.fields import flag
from pagewire.errors import StartupError
from pagewire.progress_line import duration
from pagewire.stack.running import RunningStack, running_stacks
from pagewire.tools.terminal.table import print_table, size_text

if TYPE_CHECKING:
    from pagewire.tools.served.stack_lines import StackLines
    from pagewire.v1.lines_pb2 import Line

_HEAD = ("MODEL", "STATE", "SIZE", "MEMORY", "UNTIL", "REST", "GRPC", "PID", "UP", "FOR")
_NONE = "-"


@dataclass(frozen=True, kw_only=True)
class NoFlags:
    """The configuration of commands without flags."""


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    model: str = flag("", "a model of a running stack, as `pagewire ps` names it", group="model")


def ps(argv: list[str]) -> int:
    """Prints the models of the running stacks, and returns the exit code."""
    description = "The models of the stacks of this user that run on this machine, those of the newest stack last."
    flags.parse(NoFlags, argv, prog="pagewire ps", description=description, flags_only=True)
    stacks = running_stacks()
    if not stacks:
        print("no stack is running: pagewire serve MODEL")
        return 0
    rows: list[tuple[str, ...]] = []
    problems: list[str] = []
    for stack, lines, problem in asyncio.run(models_of(stacks)):
        beside = (
            str(stack.pid),
            duration(time.time() - stack.started),
            "serve" if stack.shared else "one program",
        )
        # Without the list of its models, what is known is that the stack runs, with the first one.
        models = [_columns(line) for line in lines] or [_unlisted(stack)]
        rows += [(*model, *_ports(stack, is_first=model is models[0]), *beside) for model in models]
        problems += [problem, *map(_problem, lines)]
    print_table(_HEAD, rows)
    for problem in filter(None, problems):
        print(problem)
    return 0


def stop(argv: list[str]) -> int:
    """Takes a model out of memory, and returns the exit code. Raises StartupError."""
    config = flags.parse(
        StopConfig,
        argv,
        prog="pagewire stop",
        description="Takes MODEL out of memory once none of its requests runs; a later request loads it again.",
        positional="model",
        flags_only=True,
    )
    if not config.model:
        raise StartupError("name the model to stop; `pagewire ps` shows the models")
    stacks = [stack for stack in running_stacks() if stack.shared]
    if not asyncio.run(_stop(config.model, stacks)):
        raise StartupError(f"no stack of this user serves {config.model}; `pagewire ps` shows the models")
    return 0


async def _stop(name: str, stacks: list[RunningStack]) -> bool:
    """Stops the model in every stack that has it. Returns whether one has. Raises StartupError."""
    from pagewire.tools.served.stack_lines import StackLines, has_name

    found = False
    for stack in stacks:
        if not stack.lines:
            if name in stack.names:
                raise _only_model(name, stack)
            continue
        async with StackLines(stack) as service:
            lines = await service.listed()
            line = next((line for line in lines if has_name(line, name)), None)
            if line is None:
                continue
            if len(lines) == 1 and line.pinned:
                raise _only_model(name, stack)
            await _end(service, line)
            found = True
    return found


async def _end(service: "StackLines", line: "Line") -> None:
    if not line.tokenizer_address:
        print(f"{line.name} is not in memory")
        return
    if sys.stderr.isatty():
        print(f"{line.name} ends its requests ...", end="", file=sys.stderr, flush=True)
    try:
        await service.ended(line.name)
    finally:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    freed = f"; {size_text(line.memory_bytes)} are free" if line.memory_bytes and _is_awake(line) else ""
    print(f"stopped {line.name}{freed}")


def _only_model(name: str, stack: RunningStack) -> StartupError:
    return StartupError(
        f"{name} is the only model of process {stack.pid}, which keeps it in memory: end that process with"
        f" `kill {stack.pid}`, or by Ctrl-C where it runs; POST /v1/admin/models/{name}/sleep frees most of its memory"
    )


async def models_of(stacks: list[RunningStack]) -> list[tuple[RunningStack, list["Line"], str]]:
    """Returns each stack with its models: none, if it does not list them; and why it does not answer, or ""."""

    async def models(stack: RunningStack) -> tuple[RunningStack, list["Line"], str]:
        if not stack.lines:
            return stack, [], ""
        # Deferred: most of the time of this command would be the import of gRPC.
        from pagewire.tools.served.stack_lines import StackLines

        async with StackLines(stack) as lines:
            try:
                return stack, await lines.listed(), ""
            except StartupError as error:
                return stack, [], str(error)

    return list(await asyncio.gather(*map(models, stacks)))


def _unlisted(stack: RunningStack) -> tuple[str, ...]:
    return (",".join(stack.names), _NONE, _NONE, _NONE, _NONE)


def _ports(stack: RunningStack, *, is_first: bool) -> tuple[str, str]:
    """Returns the addresses of REST and of the public gRPC, which has the first model alone."""
    return f"{stack.rest}/v1" if stack.rest else _NONE, stack.grpc if is_first else _NONE


def _columns(line: "Line") -> tuple[str, ...]:
    """Returns the names, the state, the size of the files, the memory in use, and until when it stays there."""
    from pagewire.tools.served.stack_lines import ASLEEP, LOADING, READY

    states = {READY: "ready", ASLEEP: "asleep", LOADING: "loading"}
    names = list(dict.fromkeys((line.name, *line.served_names, *line.aliases)))
    uses = line.memory_bytes and _is_awake(line)
    memory = ("" if line.memory_measured else "~") + size_text(line.memory_bytes) if uses else _NONE
    # One that has no processes yet, but progress, looks for its files or waits for memory.
    state = states.get(line.state, "failed" if line.problem else "waiting" if line.progress else "absent")
    return ",".join(names), state, size_text(line.size_bytes) if line.size_bytes else _NONE, memory, _until(line)


def _is_awake(line: "Line") -> bool:
    """Returns whether the model takes the memory of one that serves, or is about to."""
    from pagewire.tools.served.stack_lines import LOADING, READY

    return line.state in (READY, LOADING)


def _until(line: "Line") -> str:
    """Returns until when a model stays in memory: for a time without requests; for ever, if it is pinned; or until
    another one needs the room."""
    if line.HasField("rest_time"):
        return f"in {duration(max(0.0, line.rest_time.ToMicroseconds() / 1e6 - time.time()))}"
    if not _is_awake(line):
        return _NONE
    return "forever" if line.pinned else "room is needed"


def _problem(line: "Line") -> str:
    if not line.problem:
        return ""
    again = time.localtime(line.retry_time.ToMicroseconds() / 1e6)
    later = f" (a request after {time.strftime('%H:%M:%S', again)} tries again)" if line.HasField("retry_time") else ""
    return f"{line.name}: {line.problem}{later}"
