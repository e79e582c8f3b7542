"""A stack for one program: a separate process that serves until the program closes it, or dies.

The stack watches the program by its process id, and ends with it, no matter which thread started the stack, what else
the program has started, and how it ends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

from pagewire import flags
from pagewire.errors import StartupError
from pagewire.stack import launch
from pagewire.wire.addresses import endpoint, reachable

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagewire.config import ServeConfig

# The last lines of the stack's log, which the error contains if the stack does not start.
_KEPT_LINES = 20
_STOP_MARGIN_S = 15.0
_WITHOUT_REST = "without-rest"
_POLL_S = 0.5


class OwnStack:
    """A running stack. It starts at once; call `await_ready()` before use and `close()` afterwards.

    echo: receives each line that the processes log. with_rest: starts a gateway; without it, `rest` is "".
    """

    def __init__(
        self, config: ServeConfig, echo: Callable[[str], None] | None = None, *, with_rest: bool = True
    ) -> None:
        kind = () if with_rest else (_WITHOUT_REST,)
        self._owner = os.getpid()
        program = [sys.executable, "-P", "-m", "pagewire.stack.own_stack", str(self._owner)]
        argv = [*program, *kind, *flags.to_argv(config)]
        self._stop_timeout = config.time_to_end + _STOP_MARGIN_S
        # In a new session, so that Ctrl-C in the terminal reaches only the program.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=launch.environment(config),
            start_new_session=True,
        )
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._reading = threading.Thread(target=self._read_log, args=(echo,), name="pagewire-log", daemon=True)
        self._reading.start()
        self.grpc = self.rest = ""

    @property
    def pid(self) -> int:
        """The id of the process that supervises the others."""
        return self._process.pid

    def await_ready(self) -> None:
        """Waits until the stack is ready, and sets `grpc` and `rest`. Raises StartupError with the cause."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {}
        if "grpc" not in answer:
            self.close()
            raise StartupError(answer.get("error") or "\n".join(["the stack did not start:", *self._lines]))
        self.grpc, self.rest = answer["grpc"], answer["rest"]

    def close(self) -> None:
        """Ends the stack; requests in flight may finish within --shutdown-timeout. Safe to call twice, and without
        effect in a process that the program has forked."""
        if os.getpid() != self._owner:
            return
        process = self._process
        process.terminate()
        try:
            process.wait(self._stop_timeout)
        except subprocess.TimeoutExpired:
            process.kill()  # its services die with it
            process.wait()
        self._reading.join(1.0)
        if process.stdout is not None:
            process.stdout.close()

    def _read_log(self, echo: Callable[[str], None] | None) -> None:
        stream: IO[bytes] | None = self._process.stderr
        assert stream is not None
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                if echo is not None:
                    echo(text)


def main() -> int:
    """Runs the process of the stack: prints its addresses as a line of JSON, and serves until the program ends or
    closes it."""
    program = int(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # until the supervisor takes signals
    threading.Thread(target=_end_with, args=(program,), name="watch-program", daemon=True).start()
    from pagewire.config import SET_BY_STACK, ServeConfig
    from pagewire.stack import running, stack

    # Standard output is for this line alone; anything else that is printed goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with_rest = sys.argv[2:3] != [_WITHOUT_REST]
    config = flags.parse(
        ServeConfig, sys.argv[2 if with_rest else 3 :], prog="pagewire", description="", without=SET_BY_STACK
    )

    async def serve(served: ServeConfig) -> int:
        host = reachable(served.host)
        grpc = endpoint(host, served.grpc_port)
        rest = f"http://{endpoint(host, served.port)}" if with_rest else ""
        print(json.dumps({"rest": rest, "grpc": grpc}), file=answers, flush=True)
        with running.announced(served, shared=False, with_rest=with_rest):
            await asyncio.Event().wait()  # until a signal
        return 0

    try:
        return stack.run_for(config, serve, with_rest=with_rest)
    except StartupError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return 1


def _end_with(program: int) -> None:
    """Ends this process, as close() does, once the program has ended. It may end before this begins."""
    with contextlib.suppress(OSError, AttributeError):  # it has just ended, or the kernel is older than 5.3
        ending = os.pidfd_open(program)
        while os.getppid() == program and not select.select([ending], [], [], None)[0]:
            pass
    while os.getppid() == program:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
