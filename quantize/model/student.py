"""A quantized model or layer in trainable form: the trained tensors, and the weights that they result in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagewire.kernels.quantized import GroupedWeight

# Name of a parameter -> quantized weight, or values that are not quantized.
QuantizedState: TypeAlias = dict[str, GroupedWeight | Tensor]

_SMALLEST_MAGNITUDE = 1e-3  # of a vector's root mean square, so that zeros can change
_LEAST_CHANGE = -0.5  # a scale neither vanishes nor changes its sign


class TunedWeight:
    """A weight with trained scales, and with `positions` also trained codes.

    change: float32 [N, G]; scale = original scale * (1 + change). positions: float32 [N, K] in the order of the codes,
    or None; a code is the one nearest to its position, which has the code's gradient (the straight-through estimator:
    Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", 2013). The parameter holds scale *
    (code - zero) in the model's dtype, with scales rounded to float16, so the model is always the one that would be
    written.
    """

    def __init__(self, weight: GroupedWeight, parameter: nn.Parameter, positions: Tensor | None = None) -> None:
        self._weight, self._parameter = weight, parameter
        self._permutation = None if weight.permutation is None else weight.permutation.long()
        self.change = torch.zeros(weight.scales.shape, device=parameter.device)
        self.positions = None if positions is None else positions.clone()
        zeros = weight.flat_zeros()
        assert zeros is not None  # no method here makes other offsets
        self._zeros = zeros.to(torch.int16).unsqueeze(2)
        levels = self._in_groups(weight.codes.to(torch.int16) - self._spread(self._zeros))
        self._levels = levels.to(torch.int8) if weight.bits < 8 else levels
        self.put()

    def _in_groups(self, values: Tensor) -> Tensor:
        """[N, K] -> [N, G, inputs per group]; a smaller last group is padded with zeros."""
        num_outputs, num_inputs = values.shape
        size, num_groups = self._weight.group_size, self._weight.scales.shape[1]
        return F.pad(values, (0, num_groups * size - num_inputs)).view(num_outputs, num_groups, size)

    def _spread(self, values: Tensor) -> Tensor:
        """[N, G, 1 or inputs per group] -> [N, K]"""
        return values.expand(-1, -1, self._weight.group_size).flatten(1)[:, : self._weight.shape[1]]

    def put(self) -> None:
        """Sets the parameter."""
        self.change.clamp_(min=_LEAST_CHANGE)
        if self.positions is not None:
            self._levels.copy_(self._in_groups(self._codes(self.positions) - self._spread(self._zeros)))
        weight = self._spread(self._levels.float().mul_(self._scales().float().unsqueeze(2)))
        if self._permutation is None:
            self._parameter.data.copy_(weight)
        else:
            self._parameter.data.index_copy_(1, self._permutation, weight.to(self._parameter.dtype))

    def _codes(self, positions: Tensor) -> Tensor:
        return positions.round().clamp_(0, 2**self._weight.bits - 1)

    def _scales(self) -> Tensor:
        limit = torch.finfo(torch.float16).max
        return (self._weight.scales.float() * (1 + self.change)).clamp_(max=limit).half()

    def _gradient(self) -> Tensor:
        """Returns the gradient by the weight, float32 [N, K], a copy in the order of the codes."""
        assert self._parameter.grad is not None
        gradient = self._parameter.grad.to(torch.float32, copy=True)
        return gradient if self._permutation is None else gradient[:, self._permutation]

    def take_gradient(self) -> None:
        """Sets the gradients of the change and the positions from that of the parameter."""
        gradient = self._gradient()
        sums = self._in_groups(gradient).mul(self._levels).sum(dim=2)
        self.change.grad = sums.mul_(self._weight.scales)
        if self.positions is not None:
            # Beyond the last code, a position could move far before any code changes.
            beyond = (self.positions - self._codes(self.positions)).abs_() > 0.5
            gradient *= self._spread(self._scales().float().unsqueeze(2))
            self.positions.grad = gradient.masked_fill_(beyond, 0)

    def value(self) -> GroupedWeight:
        weight = replace(self._weight, scales=self._scales())
        if self.positions is None:
            return weight
        return replace(weight, codes=self._codes(self.positions).to(torch.uint8))


class TunedVector:
    """A norm's weight or a bias: original + magnitude * change, float32 of the vector's shape."""

    def __init__(self, vector: Tensor, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._start = vector.to(torch.float32, copy=True)
        root_mean_square = self._start.square().mean().sqrt()
        self._magnitude = torch.maximum(self._start.abs(), _SMALLEST_MAGNITUDE * root_mean_square)
        self.change = torch.zeros_like(self._start)
        self.put()

    def put(self) -> None:
        """Sets the parameter."""
        self._parameter.data.copy_(self._start + self._magnitude * self.change)

    def take_gradient(self) -> None:
        """Sets change.grad from the parameter's gradient."""
        assert self._parameter.grad is not None
        self.change.grad = self._parameter.grad.float() * self._magnitude

    def value(self) -> Tensor:
        return self._parameter.detach().clone()


class Student:
    """The trained part of a model: the parameters that `state` names. The others, embedding and head, do not change.

    positions: those of weights of which the codes are also trained, as in TunedWeight.
    """

    def __init__(
        self,
        model: nn.Module,
        state: Mapping[str, GroupedWeight | Tensor],
        positions: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._parts: dict[str, TunedWeight | TunedVector] = {}
        for name, parameter in model.named_parameters():
            value = state.get(name)
            parameter.requires_grad_(value is not None)
            if isinstance(value, GroupedWeight):
                self._parts[name] = TunedWeight(value, parameter, (positions or {}).get(name))
            elif value is not None:
                self._parts[name] = TunedVector(value, parameter)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def changes(self) -> list[Tensor]:
        return [part.change for part in self._parts.values()]

    def positions(self) -> list[Tensor]:
        weights = (part for part in self._parts.values() if isinstance(part, TunedWeight))
        return [part.positions for part in weights if part.positions is not None]

    def take_gradients(self) -> None:
        for part in self._parts.values():
            part.take_gradient()

    def clear_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def is_finite(self) -> bool:
        """Returns whether all gradients are finite."""
        gradients = [tensor.grad for tensor in (*self.changes(), *self.positions()) if tensor.grad is not None]
        return bool(torch.stack([gradient.norm() for gradient in gradients]).isfinite().all())

    def put(self) -> None:
        for part in self._parts.values():
            part.put()

    def state(self) -> QuantizedState:
        return {name: part.value() for name, part in self._parts.items()}
