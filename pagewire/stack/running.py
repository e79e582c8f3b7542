"""Which stacks run on this machine: each has a file that says what it serves, locked for as long as the stack lives."""

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pagewire.config import ServeConfig
from pagewire.stack.launch import grpc_address, rest_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunningStack:
    """names: served model names. model: its files. rest: "" if there is no gateway. started: Unix time, seconds.
    shared: it is there for whoever comes, not for one program. local: a socket that this user's commands reach where
    the address of gRPC takes certificates."""

    pid: int
    names: tuple[str, ...]
    model: str
    rest: str
    grpc: str
    started: float
    shared: bool
    local: str = ""

    @property
    def reachable(self) -> str:
        """By this user's commands."""
        return self.local or self.grpc


def registry() -> Path:
    """$XDG_RUNTIME_DIR/pagewire where there is such a directory, else stacks/ in Pagewire's data directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "pagewire"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "pagewire" / "stacks"


@contextlib.contextmanager
def announced(config: ServeConfig, *, shared: bool, with_rest: bool = True, local: str = "") -> Iterator[None]:
    """The stack of this configuration, in which all is found out, is listed meanwhile.

    A stack that cannot be listed serves all the same: the log says why at level debug.
    """
    stack = RunningStack(
        pid=os.getpid(),
        names=tuple((config.served_model_name or "").split(",")),
        model=config.model,
        rest=rest_url(config) if with_rest else "",
        grpc=grpc_address(config),
        local=local,
        started=time.time(),
        shared=shared,
    )
    with contextlib.ExitStack() as resources:
        try:
            directory = registry()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Under its final name only once it is locked: a file that is not locked is one of the dead.
            file = resources.enter_context(tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", delete=False))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(asdict(stack)))
            file.flush()
            path = Path(file.name).rename(directory / f"{stack.pid}.json")
            resources.callback(path.unlink, missing_ok=True)
        except (OSError, RuntimeError) as error:
            logger.debug("this stack is not listed (`pagewire ps`): %s", error)
        yield


def running_stacks() -> list[RunningStack]:
    """Those of this user, in the order of their starts. Removes the files of the dead."""
    try:
        files = list(registry().glob("*.json"))
    except (OSError, RuntimeError):
        return []
    stacks = [stack for file in files if (stack := _read(file)) is not None]
    return sorted(stacks, key=lambda stack: stack.started)


def _read(path: Path) -> RunningStack | None:
    """None if it has ended."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                content = json.loads(file.read())
                return RunningStack(**content | {"names": tuple(content["names"])})
            path.unlink(missing_ok=True)
    # Another version's file, perhaps; or it has just gone.
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return None


def stack_that_serves(model: str, files: Path | None) -> RunningStack | None:
    """One that is there for all and serves this name, or these files."""
    for stack in filter(lambda stack: stack.shared, running_stacks()):
        if model in stack.names or (files is not None and stack.model == str(files)):
            return stack
    return None
