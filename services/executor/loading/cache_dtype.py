"""Sets what a model's attention layers store keys and values as."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from pagewire.config.executor import SMALLEST
from pagewire.config.values import kv_cache as values
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.attention.paged_attention import FP8
from pagewire.services.executor.layers.parts import select
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.kv_scales import read_kv_scales
from pagewire.services.executor.models.protocol import Model

logger = logging.getLogger(__name__)

_DTYPES = {"fp8": FP8, "int8": torch.int8}


def set_cache_dtype(model: Model, name: str) -> None:
    """Sets the dtype of each layer's cache. name: as `--kv-cache-dtype`. Raises ModelLoadError for a model with layers
    that cannot have it, unless it is `smallest`: these then store what they do without."""
    if (form := values.in_8_bits(name)) is None:
        return
    able = [layer for layer in model.attention_layers if layer.can_be_8_bits]
    if name != SMALLEST and model.caching_layers and not (able and len(able) == len(model.attention_layers)):
        raise ModelLoadError(values.of_8_bit_cache(form))
    for layer in able:
        layer.cache_dtype = _DTYPES[form]
    if model.caching_layers and not able:
        logger.info("no layer stores keys and values that could be %s: they are as without --kv-cache-dtype", form)


def set_kv_scales(model: Model, weights: WeightSource | None, path: Path, device: torch.device) -> None:
    """Gives every layer with an fp8 cache its scales: the checkpoint's if it has them, else 1. weights: None if there
    is no checkpoint."""
    layers = {layer.layer_idx: layer for layer in model.attention_layers if layer.cache_dtype is FP8}
    if not layers:
        return
    num_kv_heads = {index: layer.stored_heads[1] for index, layer in layers.items()}
    try:
        found = None if weights is None else read_kv_scales(weights, num_kv_heads)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if found is None:
        logger.info("fp8 KV cache: the checkpoint has no k_scale and v_scale, keys and values are stored with scale 1")
    for index, layer in layers.items():
        scales = torch.ones(2, num_kv_heads[index]) if found is None else found[index]
        layer.kv_scales = select(scales, (None, layer.stored_heads[0])).contiguous().to(device)
