"""The models that draft, loaded."""

from __future__ import annotations

import logging
import time

import torch

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import Speculation
from pagewire.errors import StartupError
from pagewire.models import find_model, resolve_model
from pagewire.services.executor.limits import Limits
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.memory import mib
from pagewire.services.executor.model_config import ModelLoadError
from pagewire.services.executor.models.protocol import Model, OwnModel
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.speculation.load_head import load_eagle3
from pagewire.services.executor.speculation.load_mtp import load_mtp
from pagewire.services.executor.speculation.quantized_copy import quantized_copy
from pagewire.services.executor.speculation.self_draft import bits_of

logger = logging.getLogger(__name__)


def load_drafter(
    speculation: Speculation | None,
    config: ExecutorConfig,
    target: Model,
    limits: Limits,
    device: torch.device,
    group: Group,
) -> Model | None:
    """The model that drafts for the target, if one does. Raises StartupError, or ModelLoadError."""
    if speculation is None or speculation.method not in ("self", "draft_model", "eagle3", "mtp"):
        return None
    if group.size > 1:
        raise StartupError(
            f"--speculative-config: method {speculation.method} is not supported with several ranks or stages; use "
            "method ngram, or leave out --tensor-parallel-size and --pipeline-parallel-size"
        )
    started = time.perf_counter()
    if speculation.method == "self":
        drafter: Model = _copy_of(target, speculation.model)
    else:
        drafter = _load(speculation, config, target, limits, device)
    seconds = time.perf_counter() - started
    name = speculation.model or speculation.method
    logger.info("%s drafts: weights of %s, ready in %.1f s", name, mib(drafter.weight_bytes), seconds)
    return drafter


def _copy_of(target: Model, name: str) -> OwnModel:
    if not isinstance(target, OwnModel):
        raise StartupError(
            f"--speculative-config: {name}: {target.config.architecture} runs in transformers' code, which is not "
            "quantized here; use another method, such as ngram"
        )
    return quantized_copy(target, bits_of(name))


def _load(
    speculation: Speculation, config: ExecutorConfig, target: Model, limits: Limits, device: torch.device
) -> Model:
    if speculation.method == "mtp" and not speculation.model:
        return load_mtp(find_model(config), config, target, device)
    path = resolve_model(speculation.model, speculation.revision or None, config.download_dir, config.accept_license)
    if speculation.method == "mtp":
        return load_mtp(path, config, target, device)
    if speculation.method == "eagle3":
        return load_eagle3(path, target, limits.max_model_len, device)
    drafter = load_model(
        path,
        dtype=str(target.config.dtype).removeprefix("torch."),
        device=device,
        load_format=config.load_format,
        quantization=speculation.quantization or None,
        max_model_len=speculation.max_model_len or None,
        weights_cache=config.weights_cache or None,
        seed=config.seed,
    )
    of_target, of_drafter = target.config.vocab_size, drafter.config.vocab_size
    if of_target != of_drafter:
        raise ModelLoadError(
            f"{path}: a model that drafts has the vocabulary of the one that it drafts for; this has {of_drafter} "
            f"tokens, {config.model} has {of_target}: use one of the same family"
        )
    if (
        not drafter.generates
        or not drafter.attention_layers
        or len(drafter.caching_layers) > len(drafter.attention_layers)
    ):
        raise ModelLoadError(
            f"{path}: {drafter.config.architecture} cannot draft, only models whose layers all attend to the tokens "
            "before; use another model"
        )
    return drafter
