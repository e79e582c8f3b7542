"""The progress of a batch, as vLLM's `use_tqdm` chooses it."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from pagewire.progress_line import ProgressLine

# True or False: a line on standard error, or none; None: on a terminal only; or a function such as `tqdm.tqdm`.
Progress = bool | Callable[..., Any] | None


class Counter(Protocol):
    """Counts what is done while its context lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

    def advance(self) -> None:
        """Counts one more."""


def counter(progress: Progress, total: int, unit: str) -> Counter:
    """Returns the counter for one batch. total: 0: unknown."""
    return (
        _Bar(progress(total=total or None, desc="Processed prompts"))
        if callable(progress)
        else ProgressLine(total, unit, progress)
    )


class _Bar:
    """A bar of tqdm."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self) -> None:
        self._bar.update(1)
