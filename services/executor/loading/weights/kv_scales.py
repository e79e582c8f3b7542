"""Scales of an fp8 KV cache, as a checkpoint brings them: keys and values are divided by them when they are stored.

Names as compressed-tensors, ModelOpt and AutoFP8 write them and vLLM reads them, each a number or one per KV head:
`model.layers.3.self_attn.k_scale`, `...self_attn.attn.k_scale`, `...self_attn.k_proj.k_scale`, and the same for v.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.weights import WeightSource

_SCALE = re.compile(r".*\blayers\.(\d+)\.self_attn\.(?:attn\.|[qkv]_proj\.)?(q|k|v|prob)_scale")


def is_attention_scale(name: str) -> bool:
    """Returns whether a tensor is a scale of quantized attention: not a weight, and without use for another KV cache
    dtype."""
    return _SCALE.fullmatch(name) is not None


def read_kv_scales(weights: WeightSource, num_kv_heads: Mapping[int, int]) -> dict[int, Tensor] | None:
    """Returns, by layer, fp32 [2, num_kv_heads], 0 = of keys, 1 = of values; None if the checkpoint has none.

    num_kv_heads: of the layers that have a KV cache. One that has only one of both scales uses it for both, one that
    has none is stored as it is (scale 1). Raises ModelLoadError for a scale that is not positive, of another shape, or
    of a layer that has no KV cache.
    """
    found: dict[tuple[int, int], Tensor] = {}
    for name in weights.shapes:
        match = _SCALE.fullmatch(name)
        if match is not None and match[2] in ("k", "v"):
            layer = int(match[1])
            if layer not in num_kv_heads:
                raise ModelLoadError(f"tensor {name}: the model has no KV cache of this layer")
            found[layer, "kv".index(match[2])] = _read(weights, name, num_kv_heads[layer])
    if not found:
        return None
    scales = {layer: torch.ones(2, num_heads) for layer, num_heads in num_kv_heads.items()}
    for (layer, index), scale in found.items():
        scales[layer][index] = scale
        if (layer, 1 - index) not in found:
            scales[layer][1 - index] = scale
    return scales


def _read(weights: WeightSource, name: str, num_kv_heads: int) -> Tensor:
    scale = torch.empty(weights.shapes[name])
    weights.read_into(name, scale)
    if scale.numel() not in (1, num_kv_heads):
        raise ModelLoadError(
            f"tensor {name}: expected one scale or one for each of {num_kv_heads} heads, found shape "
            f"{list(scale.shape)}"
        )
    scale = scale.flatten()
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ModelLoadError(f"tensor {name}: scales must be positive, found {scale.tolist()}")
    return scale
