"""A stack for one program: a separate process that serves until the program closes it, or dies.

The program holds one end of a pipe, and the stack ends when it reads the end of the pipe. So it never outlives the
program, no matter which thread started it and how the program ends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import subprocess
import sys
import threading
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


class OwnStack:
    """A running stack. It starts at once; call `await_ready()` before use and `close()` afterwards.

    echo: receives each line that the processes log. with_rest: starts a gateway; without it, `rest` is "".
    """

    def __init__(
        self, config: ServeConfig, echo: Callable[[str], None] | None = None, *, with_rest: bool = True
    ) -> None:
        kind = () if with_rest else (_WITHOUT_REST,)
        argv = [sys.executable, "-P", "-m", "pagewire.stack.own_stack", *kind, *flags.to_argv(config)]
        self._stop_timeout = config.time_to_end + _STOP_MARGIN_S
        # In a new session, so that Ctrl-C in the terminal reaches only the program.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
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
        """Ends the stack; requests in flight may finish within --shutdown-timeout. Safe to call twice."""
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if not self.grpc:
            process.terminate()  # it reads its input only once it is ready
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
    """Runs the process of the stack: prints its addresses as a line of JSON, and serves until the end of its input."""
    from pagewire.config import SET_BY_STACK, ServeConfig
    from pagewire.stack import running, stack

    # Standard output is for this line alone; anything else that is printed goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with_rest = sys.argv[1:2] != [_WITHOUT_REST]
    config = flags.parse(
        ServeConfig, sys.argv[1 if with_rest else 2 :], prog="pagewire", description="", without=SET_BY_STACK
    )

    async def serve(served: ServeConfig) -> int:
        host = reachable(served.host)
        grpc = endpoint(host, served.grpc_port)
        rest = f"http://{endpoint(host, served.port)}" if with_rest else ""
        print(json.dumps({"rest": rest, "grpc": grpc}), file=answers, flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, lambda: None if os.read(0, 4096) else ended.set())
        with running.announced(served, shared=False, with_rest=with_rest):
            await ended.wait()
        return 0

    try:
        return stack.run_for(config, serve, with_rest=with_rest)
    except StartupError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
