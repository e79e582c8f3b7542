"""Values of `quantization_config` and the tensors that belong to them, checked the same way for every format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import Along, Part

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Last parts of names. Every format leaves both dense unless it says otherwise.
EMBEDDINGS = ("embed_tokens", "embed_in", "word_embeddings", "wte", "wpe")
HEADS = ("lm_head", "embed_out")

Value = TypeVar("Value", int, str, bool)


def one_of(config: Mapping[str, Any], key: str, allowed: Iterable[Value], default: Value | None = None) -> Value:
    """The key's value. Raises ModelLoadError if it is none of `allowed`; default: of a key that is missing or null."""
    allowed = tuple(allowed)
    value = config.get(key)
    value = default if value is None else value
    for candidate in allowed:
        if type(value) is type(candidate) and value == candidate:
            return candidate
    raise ModelLoadError(
        f"config key quantization_config.{key}: {value!r} is not supported, expected "
        f"{' or '.join(repr(candidate) for candidate in allowed)}"
    )


def group_size_of(config: Mapping[str, Any], key: str = "group_size", default: int | None = None) -> int:
    """Returns the group size; -1 is one group for all inputs. Raises ModelLoadError unless it is that or a positive
    multiple of 8."""
    value = config.get(key, default)
    if type(value) is not int or (value != -1 and (value <= 0 or value % 8)):
        raise ModelLoadError(
            f"config key quantization_config.{key}: {value!r} is not supported, expected -1 or a multiple of 8"
        )
    return value


def strings_of(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names; none if the key is missing or null."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ModelLoadError(f"config key quantization_config.{key}: expected a list of names, found {value!r}")
    return tuple(value)


def stored_quantized(
    module: str, suffix: str, names: Collection[str] | None, dense: Collection[str] = (), lm_head: bool = False
) -> bool:
    """Returns whether the checkpoint has `suffix` of this module.

    If it has no tensor of the module, and without a checkpoint: whether it is an ordinary linear layer (lm_head: or the
    output head) and no part of its name is in `dense`; transformers and vLLM read `modules_to_not_convert` like this.
    """
    if names is not None and f"{module}.{suffix}" in names:
        return True
    if names is not None and f"{module}.weight" in names:
        return False
    last = module.rpartition(".")[2]
    return not any(part in module for part in dense) and (last not in EMBEDDINGS + HEADS or (lm_head and last in HEADS))


def groups_of(in_features: int, group_size: int) -> tuple[int, int]:
    """Returns (inputs per group, number of groups); the last group may be smaller."""
    size = in_features if group_size == -1 else min(group_size, in_features)
    return size, -(-in_features // size)


def first_group(part: Part | None, group_size: int) -> int:
    """Returns the index, in the whole weight, of a part's first group."""
    return 0 if part is None else part.inputs.start // groups_of(part.in_features, group_size)[0]


def along_groups(dim: int, size: int, groups: int) -> Along | None:
    """Inputs along a dimension of groups of `size`; a single group is that of any part."""
    return Along(dim, size) if groups > 1 else None


def check_multiple(what: str, size: int, of: int) -> None:
    if size % of:
        raise ModelLoadError(f"{what} is {size}, but this format stores {of} of them in a word; leave it unquantized")


def checked_scales(suffix: str, scales: Tensor) -> Tensor:
    """Returns scales as float16 or float32. Raises ModelLoadError for one that is infinite or not a number."""
    if not bool(scales.isfinite().all()):
        raise ModelLoadError(f"{suffix}: has values that are not finite; the checkpoint is damaged, download it again")
    return scales if scales.dtype is torch.float16 else scales.float()
