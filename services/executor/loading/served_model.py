"""Loads the model that the flags name, and other weights of the same model while it is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pagewire.config import ExecutorConfig
from pagewire.config.values import executor as values
from pagewire.errors import StartupError
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.loading.config_file import parse_overrides
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.pooling import pooling_of
from pagewire.services.executor.loading.weights.identity import content_digest
from pagewire.services.executor.models.pooling import Pooling
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from pagewire.services.executor.parallel.stage import WHOLE, Stage

DUMMY = "dummy"  # --load-format


@dataclass(frozen=True)
class ServedModel:
    model: Model
    pooling: Pooling  # the task that it is served for
    digest: str  # of its weights


def load_served(
    config: ExecutorConfig,
    path: Path,
    device: torch.device,
    load_format: str,
    progress: Progress | None = None,
    tensor: Communicator = ALONE,
    stage: Stage = WHOLE,
) -> ServedModel:
    """Loads the model to serve. path: of the model's files. load_format: as `--load-format`. tensor, stage: see
    `load_model`.

    Raises StartupError, also if memory does not suffice, or ModelLoadError.
    """
    if config.enable_expert_parallel and (refused := values.of_lone_experts(config.tensor_parallel_size)):
        raise StartupError(refused)
    overrides = parse_overrides(config.hf_overrides)
    model = load_model(
        path,
        dtype=config.dtype,
        device=device,
        load_format=load_format,
        model_impl=config.model_impl,
        max_model_len=config.max_model_len,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        weights_cache=config.weights_cache or None,
        seed=config.seed or 0,
        hf_overrides=overrides,
        tensor=tensor,
        whole_experts=config.enable_expert_parallel,
        stage=stage,
        offload_bytes=int(config.cpu_offload_gb * 2**30),
        progress=progress,
    )
    pooling = pooling_of(model, path, config.runner, config.convert, device, overrides)
    return ServedModel(model, pooling, digest_of(config, path, load_format))


def digest_of(config: ExecutorConfig, path: Path, load_format: str) -> str:
    """Returns the version of the weights at `path`."""
    return f"dummy-{config.seed or 0}" if load_format == DUMMY else content_digest(path)
