"""A program on a terminal of its own, as a person uses it: what is typed, what is seen."""

import contextlib
import errno
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).parents[3]
ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
_PATIENCE_S = 20.0
# Ctrl-C is for the foreground of the terminal that controls a session.
_PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from pagewire.cli import main
main(sys.argv[1:])
"""


def pasted(text: str) -> str:
    """Returns the bytes that a terminal sends for pasted text to a program that enabled bracketed paste."""
    return f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~"


class TerminalSession:
    """`python -m pagewire ARGV` with a terminal of `columns`. A context manager, which kills what still runs."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *argv],
            cwd=REPOSITORY,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", **environ},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""
        self._bytes = b""
        self._expected = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def insist(self, text: str, pattern: str) -> re.Match[str]:
        """Types it until the pattern is seen: readline misses a signal that comes just before it waits for a key."""
        for _ in range(20):
            self.type(text)
            with contextlib.suppress(AssertionError):
                return self.expect(pattern, 1.0)
        raise AssertionError(f"typing {text!r} again and again shows no {pattern!r}: {self.seen!r}")

    def expect(self, pattern: str, patience: float = _PATIENCE_S) -> re.Match[str]:
        """Waits for what is seen behind what was expected before, so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            if match := re.compile(pattern).search(self.seen, self._expected):
                self._expected = match.end()
                return match
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen[self._expected :]!r}"
            if not self._read(deadline):
                raise AssertionError(f"ended without {pattern!r}: {self.seen[self._expected :]!r}")

    def wait(self) -> int:
        """The exit code."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._read(deadline):
            assert time.monotonic() < deadline, f"does not end: {self.seen!r}"
        return self.process.wait(_PATIENCE_S)

    def _read(self, deadline: float) -> bool:
        """Whether there may be more."""
        if not select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return True
        try:
            piece = os.read(self._ours, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # no process has the terminal open any more
                raise
            piece = b""
        self._bytes += piece
        with contextlib.suppress(UnicodeDecodeError):  # the end of a character may be on its way
            self.seen = self._bytes.decode()
        return bool(piece)
