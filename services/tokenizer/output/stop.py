"""Stop strings, found across token borders. Text is held back only while it may still become one.

Text is checked token by token. If one token completes several stop strings, the one that begins first in the text
counts; if several begin at the same place, the first in the list does. The result depends on the tokens alone, never on
how they were batched.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopHit:
    """The end of an output: `text` is the last text to return, `stop_string` the string that was found."""

    text: str
    stop_string: str


class StopChecker:
    """The stop strings of one request."""

    __slots__ = ("_held", "_include", "_last_chars", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """stops: the stop strings, none of them empty."""
        self._stops = tuple(stops)
        self._include = include_stop_str_in_output
        # A text that ends in another character cannot end in the beginning of a stop string.
        self._last_chars = frozenset(char for stop in stops for char in stop[:-1])
        self._held = ""

    def push(self, text: str, *, check: bool = True) -> str | StopHit:
        """Returns the text that may be returned now, or the hit that ends the output.

        check=False (before min_tokens): a stop string that ends inside this text does not count; one that begins in
        it and ends later does.
        """
        if not self._stops or not text:
            return text
        seen = self._held + text
        if check and (hit := self._find(seen, len(self._held))) is not None:
            return hit
        size = self._num_held(seen)
        self._held = seen[len(seen) - size :]
        return seen[: len(seen) - size]

    def flush(self) -> str:
        """Returns the text that was held back, as no text follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, seen: str, num_old: int) -> StopHit | None:
        best, best_start = None, len(seen)
        for stop in self._stops:
            # It ends in the new text, or it would have been found before.
            start = seen.find(stop, max(0, num_old - len(stop) + 1))
            if start != -1 and start < best_start:
                best, best_start = stop, start
        if best is None:
            return None
        return StopHit(seen[: best_start + len(best) * self._include], best)

    def _num_held(self, seen: str) -> int:
        """Returns the length of the longest end of `seen` that is the beginning of a stop string."""
        if seen[-1] not in self._last_chars:
            return 0
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(seen)), longest, -1):
                if seen.endswith(stop[:size]):
                    longest = size
                    break
        return longest
