"""GPTQ: each column is rounded in turn, and the columns not yet rounded compensate for its error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.quantize.rounding.grid import Grid, Rounded, Scales, clipped_scales, min_max_scales, rounded

_BLOCK = 128  # columns; their errors change the rest together
_DAMP_STEPS = 5  # tries, each with ten times the damping, before a hessian counts as broken


@dataclass(frozen=True)
class GptqOptions:
    """The options of GPTQ. desc_act: round the columns with the largest inputs first. static_groups: groups are of
    neighbouring inputs, with scales chosen beforehand; otherwise they are of columns in the order of rounding. clip:
    search for the range of each group, instead of spanning all of it. damp: added to the hessian's diagonal, relative
    to its mean.
    """

    desc_act: bool = True
    static_groups: bool = True
    clip: bool = True
    damp: float = 0.01


def gptq(weight: Tensor, hessian: Tensor, grid: Grid, options: GptqOptions) -> Rounded:
    """Rounds a weight float32 [N, K] by GPTQ; hessian float32 [K, K]: the sum of x xT over the inputs x of
    the layer."""
    num_inputs = weight.shape[1]
    order = torch.arange(num_inputs, device=weight.device)
    if options.desc_act:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    groups = grid.groups(num_inputs)
    if not options.static_groups or not options.desc_act:
        columns = _Columns(weight[:, order], hessian[order][:, order], grid, options)
        scales = columns.in_groups(groups)
        return rounded(columns.positions, scales, grid, order if options.desc_act else None)
    scales = [_scales(weight[:, group], hessian[group, group], grid, options) for group in groups]
    columns = _Columns(weight[:, order], hessian[order][:, order], grid, options)
    columns.with_scales(scales, order // grid.size(num_inputs))
    return rounded(torch.empty_like(weight).index_copy_(1, order, columns.positions), scales, grid)


def _scales(weight: Tensor, hessian: Tensor, grid: Grid, options: GptqOptions) -> Scales:
    return clipped_scales(weight, hessian, grid) if options.clip else min_max_scales(weight, grid)


class _Columns:
    """The columns of a weight in the order of rounding. `positions`: as in Rounded, once all are rounded."""

    def __init__(self, weight: Tensor, hessian: Tensor, grid: Grid, options: GptqOptions) -> None:
        self._weight = weight.clone()  # changes with every column that is rounded
        self._hessian = hessian
        self._inverse = inverse_factor(hessian, options.damp)
        self._grid, self._options = grid, options
        self.positions = torch.empty_like(weight)

    def in_groups(self, groups: list[slice]) -> list[Scales]:
        """Rounds, and chooses the scales of each group once all columns before it are rounded."""
        chosen = []
        for group in groups:
            scales = _scales(self._weight[:, group], self._hessian[group, group], self._grid, self._options)
            for start in range(group.start, group.stop, _BLOCK):
                stop = min(start + _BLOCK, group.stop)
                self._round_block(start, stop, [scales] * (stop - start))
            chosen.append(scales)
        return chosen

    def with_scales(self, scales: list[Scales], group_of: Tensor) -> None:
        """Rounds the columns. group_of: int64 [K], the group of each column."""
        per_column = [scales[group] for group in group_of.tolist()]
        for start in range(0, len(per_column), _BLOCK):
            stop = min(start + _BLOCK, len(per_column))
            self._round_block(start, stop, per_column[start:stop])

    def _round_block(self, start: int, stop: int, scales: list[Scales]) -> None:
        inverse = self._inverse[start:stop, start:stop]
        block = self._weight[:, start:stop].T.contiguous()  # columns as rows: each is read and written as a whole
        errors = torch.empty_like(block)
        for index, group in enumerate(scales):
            column = block[index].unsqueeze(1)
            positions = group.positions(column)
            self.positions[:, start + index] = positions[:, 0]
            errors[index] = ((column - group.values(self._grid.codes(positions))) / inverse[index, index])[:, 0]
            block[index + 1 :].addr_(inverse[index, index + 1 :], errors[index], alpha=-1)
        self._weight[:, stop:].addmm_(errors.T, self._inverse[start:stop, stop:], alpha=-1)


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor of the damped hessian's inverse, float32 [K, K].

    Inputs that are always zero get a diagonal of one: their weights do not matter. Raises StartupError if the hessian
    is not finite or stays indefinite.
    """
    if not hessian.isfinite().all():
        raise StartupError("activations are not finite: the model overflows in its dtype on this text")
    damped = hessian.double()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1
    mean = diagonal.mean().item()
    for _ in range(_DAMP_STEPS):
        diagonal += damp * mean
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True).float()
        damp *= 10
    raise StartupError("the activations of a layer have no usable statistics; use more or other calibration text")
