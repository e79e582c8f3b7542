"""How far something with a known end is, in one line of standard error, if that is a terminal."""

import sys
import time

_INTERVAL_S = 0.2


class ProgressLine:
    """A context manager: the line is gone at its end. total: 0 = not known. enabled: None = if there is a terminal."""

    def __init__(self, total: int, unit: str, enabled: bool | None = None) -> None:
        self._total = total
        self._unit = unit
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._done = 0
        self._started = time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def advance(self, note: str = "") -> None:
        """One more is done; `note` follows the counts."""
        self._done += 1
        now = time.monotonic()
        if not self._enabled or (now - self._shown < _INTERVAL_S and self._done != self._total):
            return
        self._shown = now
        rate = self._done / max(now - self._started, 1e-9)
        line = f"{self._counts()}, {rate:.1f}/s"
        if self._total:
            line += f", {duration((self._total - self._done) / rate)} left"
        print(f"\r\x1b[K{line}{', ' + note if note else ''}", end="", file=sys.stderr, flush=True)

    def _counts(self) -> str:
        if not self._total:
            return f"{self._done} {self._unit}"
        return f"{100 * self._done // self._total:3}% {self._done} of {self._total} {self._unit}"


def duration(seconds: float) -> str:
    """ "1:05" or "2:00:07"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
