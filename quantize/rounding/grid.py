"""The numbers that a group of weights may take, and the choice of the grid that suits a group best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.kernels.quantized import GroupedWeight

_SMALLEST_SCALE = 2.0**-24  # the smallest positive float16
_SHRINKS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)  # parts of a group's range that clipping may keep


@dataclass(frozen=True)
class Grid:
    """A grid: weight = scale * (code - zero), codes of `bits` bits, a scale and a zero per row and group of inputs.

    group_size    inputs per group, -1 for all; the last of a row may be smaller
    symmetric     every zero is the middle code
    min_zero      smallest zero that the checkpoint format can hold
    """

    bits: int
    group_size: int
    symmetric: bool
    min_zero: int = 0

    @property
    def max_code(self) -> int:
        return 2**self.bits - 1

    def size(self, num_inputs: int) -> int:
        """Returns the inputs per group in a row of `num_inputs`."""
        return num_inputs if self.group_size == -1 else min(self.group_size, num_inputs)

    def codes(self, positions: Tensor) -> Tensor:
        """Returns the codes, float32, that are nearest to the positions of weights."""
        return positions.round().clamp_(0, self.max_code)

    def groups(self, num_inputs: int) -> list[slice]:
        size = self.size(num_inputs)
        return [slice(start, min(start + size, num_inputs)) for start in range(0, num_inputs, size)]


@dataclass(frozen=True)
class Scales:
    """Grids of one group: float32 [N, 1] each; scales are float16 numbers, zeros are whole numbers."""

    scale: Tensor
    zero: Tensor

    def positions(self, weight: Tensor) -> Tensor:
        """Returns the positions of weights between codes: float32, of weight's shape [N, columns]."""
        return (weight / self.scale).add_(self.zero)

    def codes(self, weight: Tensor, grid: Grid) -> Tensor:
        """Returns float32 whole numbers, of weight's shape [N, columns]"""
        return grid.codes(self.positions(weight))

    def values(self, codes: Tensor) -> Tensor:
        return (codes - self.zero) * self.scale

    def nearest(self, weight: Tensor, grid: Grid, out: Tensor) -> Tensor:
        """Writes the numbers of the grids that are nearest to the weights to `out`: new memory takes longer than the
        arithmetic."""
        steps = torch.div(weight, self.scale, out=out).round_()
        return steps.clamp_(-self.zero, grid.max_code - self.zero).mul_(self.scale)


@dataclass(frozen=True)
class Rounded:
    """A quantized weight, and how close each of its codes was to being another.

    positions: float32 [N, K], the numbers that were rounded to the codes, in the order of the codes.
    """

    weight: GroupedWeight
    positions: Tensor


def range_scales(low: Tensor, high: Tensor, grid: Grid) -> Scales:
    """Grids that span low to high, float32 [N, 1], low <= 0 <= high. Raises StartupError beyond float16's range."""
    if grid.symmetric:
        scale = 2 * torch.maximum(-low, high) / grid.max_code
        zero = torch.full_like(scale, (grid.max_code + 1) // 2)
    else:
        scale = (high - low) / grid.max_code
    scale = scale.half().float().clamp_(min=_SMALLEST_SCALE)
    if not scale.isfinite().all():
        raise StartupError(
            f"weights of up to {torch.maximum(-low, high).max().item():.3g} need a scale beyond float16's range: the "
            "model cannot be stored in this format"
        )
    if not grid.symmetric:
        zero = torch.round(-low / scale).clamp_(grid.min_zero, grid.max_code)
    return Scales(scale, zero)


def min_max_scales(weight: Tensor, grid: Grid) -> Scales:
    """Grids that span the whole range of each row of float32 [N, g]."""
    return range_scales(*_range(weight), grid)


def clipped_scales(weight: Tensor, hessian: Tensor, grid: Grid) -> Scales:
    """Grids that span the part of each row's range that gives the layer's output the least error.

    weight float32 [N, g], hessian float32 [g, g]: the sum of x xT over the inputs x of these columns, so that an error
    d of a row costs d H dT. Large weights are clipped where a finer grid for the others is worth more. Both ends of
    the range shrink together first, then separately.
    """
    low, high = _range(weight)
    best = _Best(range_scales(low, high, grid), weight, hessian, grid)
    factor_low, factor_high = torch.ones_like(low), torch.ones_like(high)
    for factor in _SHRINKS:
        better = best.offer(range_scales(low * factor, high * factor, grid))
        factor_low[better], factor_high[better] = factor, factor
    if not grid.symmetric:
        shrunk = factor_low.clone()
        for factor in _SHRINKS:
            better = best.offer(range_scales(low * shrunk * factor, high * factor_high, grid))
            factor_low[better] = shrunk[better] * factor
        for factor in _SHRINKS:
            best.offer(range_scales(low * factor_low, high * factor_high * factor, grid))
    return best.scales


class _Best:
    """The best grid found for each row."""

    def __init__(self, scales: Scales, weight: Tensor, hessian: Tensor, grid: Grid) -> None:
        self.scales = scales
        self._weight, self._hessian, self._grid = weight, hessian, grid
        self._delta = torch.empty_like(weight)
        self._errors = self._row_errors(scales)

    def offer(self, scales: Scales) -> Tensor:
        """Takes these grids for the rows where they are better; returns these rows, bool [N, 1]."""
        errors = self._row_errors(scales)
        better = errors < self._errors
        self._errors = torch.where(better, errors, self._errors)
        self.scales = Scales(
            torch.where(better, scales.scale, self.scales.scale), torch.where(better, scales.zero, self.scales.zero)
        )
        return better

    def _row_errors(self, scales: Scales) -> Tensor:
        delta = scales.nearest(self._weight, self._grid, self._delta).sub_(self._weight)
        return row_errors(delta, self._hessian)


def row_errors(delta: Tensor, hessian: Tensor) -> Tensor:
    """Returns float32 [N, 1]: the squared error of each output, summed over the inputs that `hessian` sums up."""
    return (delta @ hessian).mul_(delta).sum(dim=1, keepdim=True)


def round_to_nearest(weight: Tensor, grid: Grid) -> Rounded:
    """Rounds a weight float32 [N, K] to the nearest codes."""
    groups = [weight[:, columns] for columns in grid.groups(weight.shape[1])]
    scales = [min_max_scales(part, grid) for part in groups]
    positions = [found.positions(part) for found, part in zip(scales, groups, strict=True)]
    return rounded(torch.cat(positions, dim=1), scales, grid)


def rounded(positions: Tensor, scales: list[Scales], grid: Grid, permutation: Tensor | None = None) -> Rounded:
    """Returns a GroupedWeight. positions as in Rounded; scales of each group of columns; permutation as in
    GroupedWeight."""
    zeros = torch.cat([group.zero for group in scales], dim=1)
    weight = GroupedWeight(
        codes=grid.codes(positions).to(torch.uint8),
        bits=grid.bits,
        group_size=grid.size(positions.shape[1]),
        scales=torch.cat([group.scale for group in scales], dim=1).half(),
        offsets=None if grid.symmetric else zeros.to(torch.uint8),
        zero_point=(grid.max_code + 1) // 2 if grid.symmetric else 0,
        permutation=None if permutation is None else permutation.to(torch.int32),
    )
    return Rounded(weight, positions)


def _range(weight: Tensor) -> tuple[Tensor, Tensor]:
    low, high = weight.aminmax(dim=1, keepdim=True)
    return low.clamp(max=0), high.clamp(min=0)
