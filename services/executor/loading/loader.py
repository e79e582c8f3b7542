"""Loads a model from a directory or a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pagewire.config.values import executor as values
from pagewire.config.values.offload import of_offloaded_transformers
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.loading.cache_dtype import set_cache_dtype, set_kv_scales
from pagewire.services.executor.loading.checkpoint import Checkpoint, open_checkpoint
from pagewire.services.executor.loading.load_own import load_own
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from pagewire.services.executor.parallel.stage import WHOLE, Stage

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device,
    load_format: str = "auto",
    model_impl: str = "auto",
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    quantization: str | None = None,
    weights_cache: str | None = None,
    seed: int = 0,
    hf_overrides: Mapping[str, Any] | None = None,
    tensor: Communicator = ALONE,
    whole_experts: bool = False,
    stage: Stage = WHOLE,
    offload_bytes: int = 0,
    progress: Progress | None = None,
) -> Model:
    """Loads weights into a model on `device`.

    model: directory with `config.json`, or a `.gguf` file. load_format: auto, safetensors, gguf, or dummy (random
    weights by `seed`). model_impl: auto takes our own implementation where there is one, else transformers'.
    dtype auto: the checkpoint's if it has 16 bits, else bfloat16. max_model_len: longest request to serve, by
    default `max_position_embeddings`. kv_cache_dtype: as `--kv-cache-dtype`; a model without layers that can have a
    cache of 8 bits is refused. With fp8, every attention layer gets the checkpoint's scales if it has them, else 1.
    quantization: None runs weights as they are stored, a method insists on it,
    "none" dequantizes them. weights_cache: None, "auto" or a directory, see `weights.cache`. hf_overrides: replace
    keys of `config.json`. tensor: the ranks that split the model's layers, each with whole experts if whole_experts.
    stage: the part of the layers. offload_bytes: of weights that stay in host memory, on CUDA (`offload`). These four
    are for our own models only. progress: called with the fraction done and
    what was read.

    Raises ModelLoadError with the cause and the remedy.
    """
    progress = progress or _no_progress
    checkpoint = open_checkpoint(Path(model), load_format, hf_overrides)
    torch_dtype = resolve_dtype(dtype, checkpoint.dtype)
    dummy_seed = seed if load_format == "dummy" else None
    own = checkpoint.architecture in ARCHITECTURES
    if model_impl == "pagewire" and not own:
        raise ModelLoadError(
            f"{checkpoint.path}: architecture {checkpoint.architecture} is not among Pagewire's own models, "
            "which docs/models.md lists; use --model-impl transformers"
        )
    if model_impl == "transformers" or not own:
        refused = values.of_dense(quantization, checkpoint.architecture)
        refused = refused or values.of_division(checkpoint.architecture, tensor.size, stage.count)
        if offload_bytes:
            refused = refused or of_offloaded_transformers(checkpoint.architecture)
        if refused:  # GGUF files are dequantized, other quantized checkpoints refused
            raise ModelLoadError(refused)
        if weights_cache is not None:
            logger.info("weights cache: not used for models that run in transformers' code")
        loaded = _load_transformers(checkpoint, torch_dtype, device, max_model_len, dummy_seed)
        progress(1.0, checkpoint.path.name)
    else:
        loaded = load_own(
            checkpoint,
            torch_dtype,
            device,
            max_model_len=max_model_len,
            dummy_seed=dummy_seed,
            quantization=quantization,
            weights_cache=weights_cache,
            kv_cache_dtype=kv_cache_dtype,
            tensor=tensor,
            whole_experts=whole_experts,
            stage=stage,
            offload_bytes=offload_bytes,
            progress=progress,
        )
    set_cache_dtype(loaded, kv_cache_dtype)
    set_kv_scales(loaded, None if load_format == "dummy" else checkpoint.weights(), checkpoint.path, device)
    return loaded


def _load_transformers(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    dummy_seed: int | None,
) -> Model:
    # Imported here: transformers takes seconds to import, and our own models do not need it.
    from pagewire.services.executor.loading.load_transformers import load_transformers_model

    return load_transformers_model(checkpoint, dtype, device, max_model_len, dummy_seed)


def resolve_dtype(name: str, checkpoint_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype to compute in; see `load_model` for auto."""
    if name == "auto":
        is_half = checkpoint_dtype in (torch.bfloat16, torch.float16)
        return checkpoint_dtype if checkpoint_dtype is not None and is_half else torch.bfloat16
    if name not in _DTYPES:
        raise ModelLoadError(f"--dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _no_progress(fraction: float, text: str) -> None:
    pass
