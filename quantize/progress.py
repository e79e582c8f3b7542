"""Progress of a quantization: bars on a terminal, else log lines."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from typing import Any

from tqdm import tqdm

from pagewire.quantize.rounding.layer import STAGES

logger = logging.getLogger(__name__)

_NUM_MODULES = sum(len(stage.modules) for stage in STAGES)  # in a layer
_SMOOTHED = 10  # steps over which a shown divergence is averaged
_LINES = 20  # log lines of tuning


class Progress:
    """A context manager that reports progress."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._bar: tqdm[Any] | None = None
        self._line: list[str] = []
        self._recent: deque[float] = deque(maxlen=_SMOOTHED)
        self._num_steps = self._done = 0
        self._tuning_since = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _start_bar(self, total: int, title: str, unit: str) -> None:
        if self._bar is not None:
            self._bar.close()
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=title, unit=unit)

    def sampling(self, num_tokens: int) -> None:
        """Reports that the model begins to generate the calibration text."""
        self._num_steps, self._done = num_tokens, 0
        self._start_bar(num_tokens, "sampling", "token")

    def sampled(self, count: int) -> None:
        """Reports tokens of the calibration text."""
        before, self._done = self._done, self._done + count
        if self._bar is not None:
            self._bar.update(count)
        elif self._done * _LINES // self._num_steps > before * _LINES // self._num_steps:
            logger.info("sampled %d of %d tokens", self._done, self._num_steps)

    def quantizing(self) -> None:
        """Reports that the first layer begins."""
        self._start_bar(self._num_layers * _NUM_MODULES, "quantizing", "module")
        if self._bar is None:
            logger.info("quantizing %d layers", self._num_layers)

    def module(self, name: str, error: float) -> None:
        """Reports a quantized module and its error."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{name.removeprefix('model.')}: error {error:.2%}", refresh=False)
            self._bar.update()
            return
        _, _, layer, module = name.split(".", 3)
        self._line.append(f"{module.rpartition('.')[2].removesuffix('_proj')} {error:.2%}")
        if len(self._line) == _NUM_MODULES:
            logger.info("layer %d/%d: error of %s", int(layer) + 1, self._num_layers, ", ".join(self._line))
            self._line.clear()

    def layer(self, index: int, before: float, after: float) -> None:
        """Reports a tuned layer, and its error before and after."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"layer {index + 1} tuned: error {before:.2%} -> {after:.2%}")
        else:
            logger.info(
                "layer %d/%d: tuned, error %.2f%% -> %.2f%%", index + 1, self._num_layers, 100 * before, 100 * after
            )

    def tuning(self, num_steps: int) -> None:
        """Reports that tuning begins."""
        self._num_steps, self._tuning_since = num_steps, time.monotonic()
        self._start_bar(num_steps, "tuning", "step")

    def step(self, number: int, divergence: float) -> None:
        """Reports a step of tuning, from 1. divergence: KL(original || quantized) before it."""
        num_steps = self._num_steps
        self._recent.append(divergence)
        smoothed = sum(self._recent) / len(self._recent)
        if self._bar is not None:
            self._bar.set_postfix_str(f"KL {divergence:.4f}, smoothed {smoothed:.4f}", refresh=False)
            self._bar.update()
        elif number % max(1, num_steps // _LINES) == 0 or number == num_steps:
            left = (time.monotonic() - self._tuning_since) / number * (num_steps - number)
            logger.info(
                "tuning, step %d/%d: KL %.4f, smoothed %.4f, %.0f s left",
                number,
                num_steps,
                divergence,
                smoothed,
                left,
            )
