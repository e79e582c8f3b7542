"""Quantizes the linear modules of one decoder layer; modules with the same inputs are quantized together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pagewire.kernels.quantized import GroupedWeight, rows
from pagewire.quantize.rounding.activations import InputStatistics
from pagewire.quantize.rounding.awq import awq, input_scales
from pagewire.quantize.rounding.gptq import GptqOptions, gptq
from pagewire.quantize.rounding.grid import Grid, Rounded, round_to_nearest, row_errors

# The inputs of a module in the present layer.
InputsOf = Callable[[nn.Linear], InputStatistics]
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Stage:
    """Modules with the same inputs, and the module with these inputs as its outputs, element by element."""

    modules: tuple[str, ...]
    producer: str


# In the order of computation: inputs of a stage come from modules that are quantized already.
STAGES = (
    Stage(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    Stage(("self_attn.o_proj",), "self_attn.v_proj"),
    Stage(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    Stage(("mlp.down_proj",), "mlp.up_proj"),
)


@dataclass(frozen=True)
class Method:
    name: str  # awq, gptq or rtn
    grid: Grid
    gptq: GptqOptions


class LayerQuantizer:
    """Changes a layer's weights to those of the quantized model. `weights`: the quantized ones by module.

    positions: as in Rounded, by module.
    """

    def __init__(self, layer: nn.Module, method: Method, head_dim: int) -> None:
        self.weights: dict[str, GroupedWeight] = {}
        self.positions: dict[str, Tensor] = {}
        self._layer, self._method, self._head_dim = layer, method, head_dim

    def run(self, inputs_of: InputsOf, progress: Progress) -> None:
        """Quantizes a layer. progress: called with each quantized module and its error: the squared error of the output
        relative to the output's square; for rtn, which sees no inputs, that of the weight.
        """
        for stage in STAGES:
            modules = [self._linear(name) for name in stage.modules]
            weight = torch.cat([module.weight.data for module in modules]).float()
            statistics = None if self._method.name == "rtn" else inputs_of(modules[0])
            weight, rounded, hessian = self._quantize(stage, weight, statistics)
            self._set(stage.modules, rounded)
            values = rounded.weight.dequantize()
            errors, squares = _squares(values - weight, hessian), _squares(weight, hessian)
            sizes = [module.out_features for module in modules]
            for name, error, square in zip(stage.modules, errors.split(sizes), squares.split(sizes), strict=True):
                progress(name, (error.sum() / square.sum().clamp(min=1e-30)).item())

    def _quantize(
        self, stage: Stage, weight: Tensor, statistics: InputStatistics | None
    ) -> tuple[Tensor, Rounded, Tensor | None]:
        """Returns the wanted weight, the rounded weight, and the hessian of its inputs."""
        method = self._method
        if statistics is None:
            return weight, round_to_nearest(weight, method.grid), None
        hessian = statistics.hessian
        if method.name == "gptq":
            return weight, gptq(weight, hessian, method.grid, method.gptq), hessian
        producers = self._producers(stage, weight.shape[1])
        scales = input_scales(weight, hessian, statistics.magnitude, method.grid, producers)
        scales = self._divide_outputs(stage.producer, scales, producers)
        weight, hessian = weight * scales, hessian / torch.outer(scales, scales)
        return weight, awq(weight, hessian, method.grid, method.gptq), hessian

    def _producers(self, stage: Stage, num_inputs: int) -> Tensor | None:
        """Returns the output of v_proj that each input of o_proj comes from; None for other stages."""
        if stage.producer != "self_attn.v_proj":
            return None
        num_values = self._linear(stage.producer).out_features
        inputs = torch.arange(num_inputs, device=self._linear(stage.producer).weight.device)
        heads_per_value = num_inputs // num_values
        return inputs // (self._head_dim * heads_per_value) * self._head_dim + inputs % self._head_dim

    def _divide_outputs(self, name: str, scales: Tensor, producers: Tensor | None) -> Tensor:
        """Divides a module's outputs; returns the actual divisors [K] of the next module's inputs."""
        module = self._layer.get_submodule(name)
        if not isinstance(module, nn.Linear):
            norm = self._layer.get_parameter(f"{name}.weight").data
            before = norm.to(torch.float32, copy=True)
            norm.copy_(before / scales)
            after = norm.float()  # rounded; the next module's weight must compensate for it
            return torch.where(after == 0, scales, before / after)
        outputs = scales
        if producers is not None:
            outputs = torch.ones(module.out_features, device=scales.device).index_copy_(0, producers, scales)
        weight = self.weights[name]
        weight = replace(weight, scales=(weight.scales.float() / outputs[:, None]).half())
        self._set((name,), Rounded(weight, self.positions[name]))
        if module.bias is not None:
            module.bias.data.copy_(module.bias.data.float() / outputs)
        return scales

    def _set(self, names: tuple[str, ...], rounded: Rounded) -> None:
        """Sets the weights of these modules; their outputs in order are those of `rounded`."""
        start = 0
        for name in names:
            module = self._linear(name)
            stop = start + module.out_features
            weight = rows(rounded.weight, start, stop)
            self.weights[name], self.positions[name] = weight, rounded.positions[start:stop]
            start = stop
            module.weight.data.copy_(weight.dequantize())

    def _linear(self, name: str) -> nn.Linear:
        module = self._layer.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module


def _squares(weight: Tensor, hessian: Tensor | None) -> Tensor:
    """float32 [N, 1]: each output's square, summed over the inputs of a hessian; or the square of each row."""
    return weight.square().sum(dim=1, keepdim=True) if hessian is None else row_errors(weight, hessian)
