"""The list of stacks that run on this machine: each has a file about itself, locked while the stack runs."""

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from pagewire.config import ServeConfig
from pagewire.stack.launch import grpc_address, rest_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunningStack:
    """A stack that runs.

    names: served model names. model: its files. rest: "" without a gateway. started: Unix time, seconds. shared:
    whether it serves any client, not only one program. local: a socket for commands of this user, if the gRPC address
    needs certificates. lines: the address of LineService; "": it has none.
    """

    pid: int
    names: tuple[str, ...]
    model: str
    rest: str
    grpc: str
    started: float
    shared: bool
    local: str = ""
    lines: str = ""

    @property
    def reachable(self) -> str:
        """The address for commands of this user."""
        return self.local or self.grpc


def registry() -> Path:
    """Returns $XDG_RUNTIME_DIR/pagewire if that directory exists, else stacks/ in Pagewire's data directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "pagewire"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "pagewire" / "stacks"


@contextlib.contextmanager
def announced(
    config: ServeConfig,
    *,
    shared: bool,
    with_rest: bool = True,
    local: str = "",
    names: Sequence[str] = (),
    lines: str = "",
) -> Iterator[Callable[[Sequence[str]], None]]:
    """Lists the stack of this resolved configuration for the time of the context, which gets a function that changes
    its names.

    names: those of all models; without them, those of the configuration. A stack that cannot be listed serves
    nevertheless; the log has the cause at level debug.
    """
    stack = RunningStack(
        pid=os.getpid(),
        names=tuple(names or (config.served_model_name or "").split(",")),
        model=config.model,
        rest=rest_url(config) if with_rest else "",
        grpc=grpc_address(config),
        local=local,
        started=time.time(),
        shared=shared,
        lines=lines,
    )
    listed: IO[str] | None = None

    def rename(names: Sequence[str]) -> None:
        if listed is not None:
            _rewrite(listed, replace(stack, names=tuple(names)))

    with contextlib.ExitStack() as resources:
        try:
            directory = registry()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # It gets its final name once it is locked: an unlocked file counts as that of a dead stack.
            file = resources.enter_context(tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", delete=False))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(asdict(stack)))
            file.flush()
            path = Path(file.name).rename(directory / f"{stack.pid}.json")
            resources.callback(path.unlink, missing_ok=True)
            listed = file.file
        except (OSError, RuntimeError) as error:
            logger.debug("this stack is not listed (`pagewire ps`): %s", error)
        yield rename


def _rewrite(file: IO[str], stack: RunningStack) -> None:
    """Replaces the content of a stack's file by one write: others may be reading it."""
    content, size = json.dumps(asdict(stack)).encode(), os.fstat(file.fileno()).st_size
    try:
        os.pwrite(file.fileno(), content.ljust(size), 0)
    except OSError as error:
        logger.debug("this stack is listed with its former names: %s", error)


def running_stacks() -> list[RunningStack]:
    """Returns the running stacks of this user in the order of their starts. Removes the files of dead stacks."""
    try:
        files = list(registry().glob("*.json"))
    except (OSError, RuntimeError):
        return []
    stacks = [stack for file in files if (stack := _read(file)) is not None]
    return sorted(stacks, key=lambda stack: stack.started)


def _read(path: Path) -> RunningStack | None:
    """Returns None for a stack that has ended."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                content = json.loads(file.read())
                return RunningStack(**content | {"names": tuple(content["names"])})
            path.unlink(missing_ok=True)
    # The file is of another version, or was just removed.
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def stack_that_serves(model: str, files: Path | None) -> RunningStack | None:
    """Returns a shared stack that serves this name, or these files."""
    for stack in filter(lambda stack: stack.shared, running_stacks()):
        if model in stack.names or (files is not None and stack.model == str(files)):
            return stack
    return None
