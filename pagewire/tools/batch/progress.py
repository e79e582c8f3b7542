"""Progress of a batch: a line that is updated on a terminal, elsewhere an occasional line."""

import asyncio
import sys
import time

from pagewire.batch.results import Results
from pagewire.progress_line import duration

TERMINAL_S, LOG_S = 0.5, 30.0


class Progress:
    def __init__(self, results: Results, total: int) -> None:
        self._results = results
        self._total = total
        self._before = len(results.done)
        self._started = time.monotonic()
        self._terminal = sys.stderr.isatty()

    async def run(self) -> None:
        """Shows progress until cancelled."""
        while True:
            await asyncio.sleep(TERMINAL_S if self._terminal else LOG_S)
            self._print(self._line(), end="" if self._terminal else "\n")

    def interrupt(self) -> None:
        """Clears the line for other output."""
        if self._terminal:
            self._print("", end="")

    def end(self) -> None:
        usage, seconds = self._results.usage, time.monotonic() - self._started
        self._print(
            f"{self._counts()} in {seconds:.1f} s; of all answers: {usage.input_tokens} tokens in,"
            f" {usage.output_tokens} out"
        )

    def _line(self) -> str:
        done = len(self._results.done)
        rate = (done - self._before) / (time.monotonic() - self._started)
        left = f", {duration((self._total - done) / rate)} left" if rate else ""
        return f"{self._counts()}, {rate:.1f}/s{left}"

    def _counts(self) -> str:
        failed = f", {self._results.num_failed} of them failed" if self._results.num_failed else ""
        return f"{len(self._results.done)} of {self._total} requests are done{failed}"

    def _print(self, text: str, end: str = "\n") -> None:
        begin = "\r\x1b[K" if self._terminal else ""
        print(begin + text, end=end, file=sys.stderr, flush=True)
