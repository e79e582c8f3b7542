"""The memory that a model would take, computed before loading it, for callers that check what fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from pagewire.config import ExecutorConfig
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.loading.cache_dtype import set_cache_dtype
from pagewire.services.executor.loading.check_tensors import check_tensors
from pagewire.services.executor.loading.checkpoint import open_checkpoint
from pagewire.services.executor.loading.config_file import parse_overrides
from pagewire.services.executor.loading.load_own import dense_bytes, make_own, module_bytes, served_len
from pagewire.services.executor.loading.loader import resolve_dtype
from pagewire.services.executor.loading.offload import choose
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.step.limits import Limits


@dataclass(frozen=True)
class Footprint:
    """Returns the bytes of one rank that has the whole model."""

    model: OwnModel  # without allocated memory
    weight_bytes: int
    offloaded_bytes: int = 0  # that --cpu-offload-gb would save on a device

    def cache_bytes(self, num_tokens: int, limits: Limits) -> int:
        """Returns the bytes of a KV cache for that many tokens."""
        return kv_cache.cache_bytes(self.model, -(-num_tokens // limits.block_size), limits)


def _device(config: ExecutorConfig) -> torch.device:
    on_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if on_cuda else "cpu")


def footprint(config: ExecutorConfig, path: Path) -> Footprint | None:
    """Returns None for models in transformers' code, as their footprint is known only when they are loaded.

    path: of the model's files. Raises ModelLoadError as loading would.
    """
    checkpoint = open_checkpoint(path, config.load_format, parse_overrides(config.hf_overrides))
    if config.model_impl == "transformers" or checkpoint.architecture not in ARCHITECTURES:
        return None
    model_config = checkpoint.config(resolve_dtype(config.dtype, checkpoint.dtype))
    weights = None if config.load_format == "dummy" else checkpoint.weights()
    found = checkpoint.quantization(weights, config.quantization)
    placement = Placement(model_config.dtype, _device(config), found)
    placement = replace(placement.widened(), device=torch.device("meta"))
    length = served_len(path, model_config, config.max_model_len)
    model = make_own(checkpoint, model_config, length, placement)
    set_cache_dtype(model, config.kv_cache_dtype)
    stored = 0 if weights is None else check_tensors(path, weights, model)
    quantized = dense_bytes(model) if config.quantization == "none" else stored
    return Footprint(model, model.weight_bytes + quantized, _offloaded(config, model, weights, model_config.dtype))


def _offloaded(config: ExecutorConfig, model: OwnModel, weights: WeightSource | None, dtype: torch.dtype) -> int:
    if not config.cpu_offload_gb:
        return 0
    stored = None if config.quantization == "none" else weights
    num_bytes = int(config.cpu_offload_gb * config.num_ranks * 2**30)  # of each device
    return choose(model, num_bytes, partial(module_bytes, stored, dtype)).saved_bytes
