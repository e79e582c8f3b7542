"""The phases of starting: their times, and an error that names the flags to lower if one runs out of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagewire.services.executor import stats
from pagewire.services.executor.device.memory import OutOfMemoryError


class Phases:
    """Seconds that each phase of starting took."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @contextmanager
    def __call__(self, name: str, notes: list[str] | None = None) -> Iterator[None]:
        """Times a phase. notes: shown with its time when it ends. Raises OutOfMemoryError where torch does."""
        started = time.perf_counter()
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemoryError(
                f"the device ran out of memory at start ({name.replace('_', ' ')}): lower --max-num-batched-tokens, "
                f"--max-num-seqs or --gpu-memory-utilization ({error})"
            ) from error
        seconds = time.perf_counter() - started
        stats.LOAD_SECONDS.labels(name).set(seconds)
        self._texts.append(f"{name.replace('_', ' ')} {seconds:.2f} s{''.join(f' ({note})' for note in notes or ())}")

    def __str__(self) -> str:
        return ", ".join(self._texts)
