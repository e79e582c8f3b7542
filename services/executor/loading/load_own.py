"""Loads one of our own models: checks the checkpoint, then allocates memory and fills it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pagewire.config import model_refusals
from pagewire.kernels.ops import cpu_backend
from pagewire.process.process import usable_cores
from pagewire.services.executor.config.model_config import ModelConfig, ModelLoadError
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.copies import CudaCopies
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.layers.experts.experts import ExpertsLinear
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.weights import WeightModule
from pagewire.services.executor.loading import weights_report
from pagewire.services.executor.loading.cache_dtype import set_cache_dtype
from pagewire.services.executor.loading.check_tensors import check_tensors, has_own_head
from pagewire.services.executor.loading.checkpoint import Checkpoint
from pagewire.services.executor.loading.filler import MAX_THREADS, Filler, stored_bytes
from pagewire.services.executor.loading.offload import NOTHING, StreamingModel, choose, stream_layers
from pagewire.services.executor.loading.quantization.install import num_weights
from pagewire.services.executor.loading.quantization.registry import check_requested
from pagewire.services.executor.loading.stages import stage_of
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.cache import WeightsCache
from pagewire.services.executor.loading.weights.pack_dense import pack_dense, packs_dense
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from pagewire.services.executor.parallel.stage import WHOLE, Stage

logger = logging.getLogger(__name__)

_MOST_FOR_DENSE = 0.7  # of the free memory; the rest is for the KV cache and activations


def load_own(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_model_len: int | None,
    dummy_seed: int | None,
    quantization: str | None,
    weights_cache: str | None,
    kv_cache_dtype: str,
    tensor: Communicator = ALONE,
    whole_experts: bool = False,
    stage: Stage = WHOLE,
    offload_bytes: int = 0,
    progress: Progress,
) -> OwnModel:
    """Loads a model like `loader.load_model`. dummy_seed: None, or the seed of random weights without a checkpoint.
    kv_cache_dtype: raises ModelLoadError if a layer cannot have it. tensor, whole_experts: see `Placement`. stage: its
    layers are chosen here. offload_bytes: of weights that are to stay in host memory."""
    config = checkpoint.config(dtype)
    length = served_len(checkpoint.path, config, max_model_len)
    weights = None if dummy_seed is not None else checkpoint.weights()
    found = checkpoint.quantization(weights, quantization)
    check_requested(quantization, found)
    # On "meta", without memory: errors of the checkpoint or the device's size are found before any is allocated.
    placement = Placement(config.dtype, device, found, tensor=tensor, whole_experts=whole_experts).widened()
    nowhere = replace(placement, device=torch.device("meta"))
    shapes = make_own(checkpoint, config, length, nowhere)
    if weights is not None and has_own_head(shapes, weights):
        logger.warning("config key tie_word_embeddings is true, but the checkpoint has a head of its own: it is used")
        config = config.untied()
        shapes = make_own(checkpoint, config, length, nowhere)
    _check_served(checkpoint, shapes, tensor)
    set_cache_dtype(shapes, kv_cache_dtype)
    whole = shapes
    if whole_experts:
        _check_experts(checkpoint, shapes)
        # The checkpoint has all of them.
        whole = make_own(checkpoint, config, length, replace(nowhere, tensor=ALONE, whole_experts=False))
    stored = 0 if weights is None else check_tensors(checkpoint.path, weights, whole)
    cache_order = [layer.kv_spec() for layer in shapes.caching_layers] if stage.count > 1 else []
    if stage.count > 1:
        placement = replace(placement, stage=stage_of(whole, stage))
    if stage.count > 1 or whole_experts:
        shapes = make_own(checkpoint, config, length, replace(placement, device=torch.device("meta")))
        stored = 0 if weights is None else _quantized_bytes(weights, shapes)
    for_torch = quantization is None and found is not None and _suits_torch(shapes, device)
    dequantize = quantization == "none" or for_torch
    offload = NOTHING
    if offload_bytes:
        offload = choose(shapes, offload_bytes, partial(module_bytes, None if dequantize else weights, dtype))
        assert isinstance(whole, StreamingModel)
        numbers = placement.stage.layers(len(whole.layers))
        placement = replace(placement, host_layers=frozenset(numbers[index] for index in offload.layers))
    needed = shapes.weight_bytes + (dense_bytes(shapes) if dequantize else stored) - offload.saved_bytes
    memory.check_weights_fit(needed, device)
    model = make_own(checkpoint, config, length, placement)
    model.cache_order = tuple(dict.fromkeys(cache_order))
    filler = Filler(model, device, dequantize, min(MAX_THREADS[device.type], usable_cores()), progress, offload)
    cache = None
    if weights_cache is not None and offload_bytes:
        logger.info("--weights-cache is not used: weights that --cpu-offload-gb keeps in host memory are not cached")
    elif weights is not None and weights_cache is not None:
        cache = _cache_at(weights_cache, checkpoint, dtype, placement, dequantize=dequantize)
    if cache is None or not cache.load(model, filler.num_threads, progress):
        if weights is None:
            filler.fill_randomly(dummy_seed or 0)
        else:
            filler.read(checkpoint.path, weights)
        if packs_dense(dtype, device):
            pack_dense(model)
        if cache is not None:
            cache.save(model)
    model.finish_loading()
    if offload_bytes:
        stream_layers(model, offload, device, CudaCopies(device))
    why = "as plain torch multiplies them far faster" if for_torch else "as --quantization none asks"
    weights_report.report(model, found, weights, dequantized=why if dequantize else "")
    return model


def _suits_torch(shapes: OwnModel, device: torch.device) -> bool:
    """Whether the model is multiplied by plain torch, which would dequantize its weights in every product, and has
    memory to dequantize them once."""
    if device.type != "cpu" or cpu_backend() != "torch":
        return False
    fits = shapes.weight_bytes + dense_bytes(shapes) <= _MOST_FOR_DENSE * memory.available_bytes(device)
    if not fits:
        logger.warning("too little memory to dequantize the weights once: plain torch does it in every product")
    return fits


def make_own(checkpoint: Checkpoint, config: ModelConfig, length: int, placement: Placement) -> OwnModel:
    """Builds the model without weights."""
    try:
        return ARCHITECTURES[checkpoint.architecture].model(config, length, placement)
    except ModelLoadError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error


def _check_served(checkpoint: Checkpoint, shapes: OwnModel, tensor: Communicator) -> None:
    """Raises ModelLoadError for a model that cannot be split."""
    if tensor.size > 1 and shapes.unsplit is not None:
        raise ModelLoadError(
            f"{checkpoint.path}: --tensor-parallel-size {tensor.size}: tensor parallel is not supported for "
            f"{checkpoint.architecture}: {shapes.unsplit}"
        )


def _cache_at(
    directory: str, checkpoint: Checkpoint, dtype: torch.dtype, placement: Placement, *, dequantize: bool
) -> WeightsCache:
    return WeightsCache.at(
        directory,
        checkpoint.path,
        dtype,
        placement.device,
        dequantize=dequantize,
        overrides=checkpoint.overrides,
        tensor=placement.tensor,
        whole_experts=placement.whole_experts,
        stage=placement.stage,
    )


def _check_experts(checkpoint: Checkpoint, model: OwnModel) -> None:
    if not any(isinstance(leaf, ExpertsLinear) for leaf in model.leaves()):
        raise ModelLoadError(f"{checkpoint.path}: {model_refusals.of_experts(checkpoint.architecture)}")


def served_len(path: Path, config: ModelConfig, max_model_len: int | None) -> int:
    """Returns `max_model_len`, checked against the model's range of positions."""
    if max_model_len is None:
        return config.max_position_embeddings
    if max_model_len > config.max_supported_len:
        raise ModelLoadError(f"{path}: {model_refusals.of_length(max_model_len, config.max_supported_len)}")
    return max_model_len


def _quantized_bytes(weights: WeightSource, model: OwnModel) -> int:
    shards = (shard for module in model.quantized_modules() for shard in module.shards)
    return sum(stored_bytes(weights, shard) for shard in shards if shard.format is not None)


def module_bytes(weights: WeightSource | None, dtype: torch.dtype, module: WeightModule) -> int:
    """Returns the bytes of a module's weight. weights: where quantized ones are stored; None: they become dense."""
    if all(shard.format is None for shard in module.shards):
        return sum(part.nbytes for part in module.parts)
    size = partial(stored_bytes, weights) if weights is not None else lambda shard: num_weights(shard) * dtype.itemsize
    return sum(map(size, module.shards))


def dense_bytes(model: OwnModel) -> int:
    """Returns the bytes that quantized modules would have if they were dense."""
    shards = (shard for module in model.quantized_modules() for shard in module.shards)
    return sum(map(num_weights, shards)) * model.config.dtype.itemsize
