"""Input at a terminal: lines with editing and history, and messages of several lines."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pagewire.tools.generate import valid_text

_QUOTES = '"""'
_KEPT = 1000  # lines of history


def history_file() -> Path:
    """Returns the path of chat_history in Pagewire's directory of $XDG_STATE_HOME."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pagewire" / "chat_history"


@contextlib.contextmanager
def editing() -> Iterator[None]:
    """Lets input() edit lines on a terminal, and stores them as history."""
    try:
        import readline
    except ImportError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    # Alt-Enter puts a newline into the line, as Ctrl-V Ctrl-J does.
    readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
    # Python turns it off. With it, pasted text is one message, even with several lines.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_history_length(_KEPT)
    with contextlib.suppress(OSError, RuntimeError):
        readline.read_history_file(history_file())
    try:
        yield
    finally:
        # A full disk must not end a conversation.
        with contextlib.suppress(OSError, RuntimeError):
            history_file().parent.mkdir(parents=True, exist_ok=True)
            history_file().touch(mode=0o600)
            readline.write_history_file(history_file())


def read_message(prompt: str) -> str | None:
    """Returns one message without the marks that join its lines; None at the end of the input.

    Blocks the event loop, which has no other work meanwhile. Raises KeyboardInterrupt.
    """
    more = "... " if prompt else ""
    try:
        line = _line(prompt)
    except EOFError:
        return None
    # The following lines are part of a message, which the end of the input ends, too.
    with contextlib.suppress(EOFError):
        if line.lstrip().startswith(_QUOTES):
            line = line.lstrip().removeprefix(_QUOTES)
            while not line.rstrip().endswith(_QUOTES):
                line += "\n" + _line(more)
            return line.rstrip().removesuffix(_QUOTES).strip("\n")
        while line.endswith("\\"):
            line = line.removesuffix("\\") + "\n"
            line += _line(more)
    return line.strip()


def _line(prompt: str) -> str:
    return valid_text(lambda: input(prompt))
