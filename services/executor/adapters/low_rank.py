"""The weights of an adapter in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Modules to which adapters are not applied.
_UNSERVED = {
    "lm_head": "the output head",
    "embed_out": "the output head",
    "embed_tokens": "the embedding",
    "wte": "the embedding",
}


class AdapterError(Exception):
    """An adapter cannot be served; the message names cause and remedy."""


@dataclass(frozen=True)
class LowRank:
    """Factors of a change of one projection's weight: scale * up @ down is added to it."""

    down: Tensor  # [rank, num_inputs]
    up: Tensor  # [num_outputs, rank], of down's dtype
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True)
class Stack:
    """Factors of the changes of one parameter that has a weight for each expert of a layer. Their shapes tell which of
    the module's parameters it is."""

    module: str  # "model.layers.0.mlp.experts"
    down: Tensor  # [num_experts * rank, num_inputs], expert by expert
    up: Tensor  # [num_outputs, rank * num_experts], rank by rank
    terms: Callable[[str], tuple[int, float]]  # name of the parameter within the module -> rank, scale


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter in host memory, which no longer depends on its files."""

    digest: str  # sha256 of its contents, in hexadecimal
    base_model: str  # the name that it states, "" if none; nothing is checked against it
    modules: Mapping[str, LowRank]  # by the checkpoint's name of a projection, "model.layers.0.self_attn.q_proj"
    stacks: Mapping[str, Stack] = field(default_factory=dict)  # by a name in the file


def checked_module(where: str, name: str, down: Tensor, up: Tensor, scale: float) -> LowRank:
    """Returns a module's weights. where: begins the message of the AdapterError that is raised if they are none."""
    down, up = checked_factors(where, name, down, up)
    return LowRank(down, up, scale)


def checked_factors(where: str, name: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both of one dtype. Raises AdapterError as `checked_module` does."""
    last = name.rpartition(".")[2]
    if (what := _UNSERVED.get(last)) is not None:
        raise AdapterError(
            f"{where}: {name} is {what}, to which adapters are not applied; train without it in target_modules, or "
            "merge the adapter into its model (peft: merge_and_unload)"
        )
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1] or 0 in (*down.shape, *up.shape):
        raise AdapterError(
            f"{where}: {name} has the shapes {list(down.shape)} and {list(up.shape)}, expected [rank, inputs] and "
            "[outputs, rank]; only adapters of linear layers can be served"
        )
    if down.dtype not in _DTYPES or up.dtype not in _DTYPES:
        raise AdapterError(
            f"{where}: {name} is {down.dtype} and {up.dtype}, expected float32, bfloat16 or float16; save the adapter "
            "in one of these"
        )
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise AdapterError(f"{where}: {name} has values that are not finite; the file is damaged or training diverged")
    return down, up.to(down.dtype)
