"""Programs in processes that have imported torch already: a fork takes milliseconds, an import two seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Forks:
    """Runs programs in forks of one process. Threads may run several at once."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.kernels.forked"]
        self._parent = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True)

    def output_of(self, program: str, environment: Mapping[str, str]) -> str:
        """Returns what a program prints. Raises AssertionError, with that, unless it ends with status 0."""
        with tempfile.TemporaryDirectory() as directory:
            output, status = Path(directory, "output"), Path(directory, "status")
            os.mkfifo(status)
            request = {"program": program, "environment": {**os.environ, **environment}, "directory": directory}
            assert self._parent.stdin is not None
            self._parent.stdin.write(json.dumps(request) + "\n")
            self._parent.stdin.flush()
            ended = status.read_text()  # empty if a signal ended the program
            assert ended == "0", output.read_text()
            return output.read_text()

    def close(self) -> None:
        self._parent.communicate()


def main() -> None:
    """Forks for each line of JSON on the standard input, until it ends."""
    import torch  # noqa: F401 - the programs import it

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave nothing to wait for
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(**json.loads(line))


def _run(program: str, environment: dict[str, str], directory: str) -> None:
    status = 1
    with Path(directory, "status").open("w") as ended:
        try:
            with Path(directory, "output").open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            exec(program, {"__name__": "__main__"})
            status = 0
        except BaseException:  # whatever the program raises is its output, and the fork ends here
            traceback.print_exc()
        sys.stdout.flush()
        ended.write(str(status))
    os._exit(status)


if __name__ == "__main__":
    main()
