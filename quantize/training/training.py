"""The common parts of training a whole model and one layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagewire.quantize.model.decoder import Decoder
from pagewire.services.executor.device.memory import available_bytes

logger = logging.getLogger(__name__)

WARMUP_STEPS = 4
BETAS = (0.9, 0.95)
EPSILON = 1e-12
SEED = 0


class Descent:
    """Adam, with rates that rise for a few steps and fall to zero at the last.

    groups: tensors with gradients in `.grad`, and by how much each of their elements changes in one of
    the first steps.
    """

    def __init__(self, groups: Sequence[tuple[list[Tensor], float]], num_steps: int) -> None:
        self._rates, self._num_steps, self._step = [rate for _, rate in groups], num_steps, 0
        self._adam = torch.optim.Adam([{"params": tensors} for tensors, _ in groups], betas=BETAS, eps=EPSILON)

    def step(self) -> None:
        factor = min(1, (self._step + 1) / WARMUP_STEPS) * (1 - self._step / self._num_steps)
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._adam.step()
        self._step += 1


def batches(num_sequences: int, size: int) -> Iterator[Tensor]:
    """Yields picks of `size` sequences, or of all if there are fewer, endlessly; each occurs once before any recurs."""
    generator = torch.Generator().manual_seed(SEED)
    size = min(size, num_sequences)
    left = torch.empty(0, dtype=torch.int64)
    while True:
        if len(left) < size:
            left = torch.cat([left, torch.randperm(num_sequences, generator=generator)])
        picks, left = left[:size], left[size:]
        yield picks


def steps_that_fit(num_steps: int, decoder: Decoder, needed: int, flag: str, what: str) -> int:
    """Returns `num_steps`, or 0 with a warning where memory may not suffice.

    needed: bytes; flag: the option that tunes anyway; what: the thing that is tuned.
    """
    available = available_bytes(decoder.device)
    if 2 * needed <= available:
        return num_steps
    logger.warning(
        "not tuning %s, which takes about %.1f GB, more than half of the free %.1f GB; tune anyway with %s %d",
        what,
        needed / 1e9,
        available / 1e9,
        flag,
        num_steps,
    )
    return 0


def activation_bytes(decoder: Decoder) -> int:
    """Estimates the bytes that autograd keeps per token and layer."""
    config, size = decoder.source.config, decoder.source.dtype.itemsize
    # Measured: norms in float32, projections and their rotation, the MLP.
    return size * (20 * config.hidden_size + 5 * config.intermediate_size + 8 * config.num_heads * config.head_dim)
