"""A line of progress on standard error, if that is a terminal."""

import shutil
import sys
import time

_INTERVAL_S = 0.2
# Without a terminal, where lines remain.
_LINE_INTERVAL_S = 5.0


class ProgressLine:
    """A context manager that removes the line at its end. total: 0: unknown. enabled: None: if there is a terminal."""

    def __init__(self, total: int, unit: str, enabled: bool | None = None) -> None:
        self._total = total
        self._unit = unit
        self._terminal = sys.stderr.isatty()
        self._enabled = self._terminal if enabled is None else enabled
        self._interval = _INTERVAL_S if self._terminal else _LINE_INTERVAL_S
        self._done = 0
        self._started = time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def advance(self, note: str = "") -> None:
        """Counts one more; `note` follows the counts."""
        self.reach(self._done + 1, note)

    def reach(self, done: int, note: str = "") -> None:
        """Sets the count."""
        self._done = done
        now = time.monotonic()
        if not self._enabled or (now - self._shown < self._interval and self._done != self._total):
            return
        self._shown = now
        rate = self._done / max(now - self._started, 1e-9)
        line = f"{self._counts()}, {rate:.1f}/s"
        if self._total and rate:
            line += f", {duration((self._total - self._done) / rate)} left"
        line += f", {note}" if note else ""
        if self._terminal:
            # A wrapped line could not be removed.
            line = f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}"
        print(line, end="" if self._terminal else "\n", file=sys.stderr, flush=True)

    def _counts(self) -> str:
        if not self._total:
            return f"{self._done} {self._unit}"
        return f"{100 * self._done // self._total:3}% {self._done} of {self._total} {self._unit}"


def duration(seconds: float) -> str:
    """Returns a duration, for instance "1:05" or "2:00:07"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
