"""Loads the models that draft."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import LOOKUP_METHODS, Speculation
from pagewire.config.values import drafts
from pagewire.errors import StartupError
from pagewire.files.models import find_model, resolve_model
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.memory import mib
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.served_model import DUMMY
from pagewire.services.executor.loading.twins import twins
from pagewire.services.executor.loading.weights.identity import content_digest
from pagewire.services.executor.models.protocol import Model, OwnModel
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.speculation.load_head import load_head
from pagewire.services.executor.speculation.load_mtp import load_mtp
from pagewire.services.executor.speculation.quantized_copy import quantized_copy, saved_bytes, shared_copy
from pagewire.services.executor.step.limits import Limits

logger = logging.getLogger(__name__)

# A copy drafts by default if it takes at most this share of the free memory, and if more than this share of the model's
# bytes are weights that the copy has in fewer bits.
_MOST_OF_MEMORY, _LEAST_SAVED = 0.25, 0.5


def load_drafter(
    speculation: Speculation | None,
    config: ExecutorConfig,
    target: Model,
    limits: Limits,
    device: torch.device,
    group: Group,
) -> Model | None:
    """Returns the model that drafts for the target, or None. Raises StartupError or ModelLoadError."""
    if speculation is None:
        return None
    if speculation.if_possible:
        return copy_for_later(target, device, group) if speculation.with_copy and speculation.adaptive else None
    if speculation.method in LOOKUP_METHODS:
        return None
    drafts.check(speculation, group.tensor.size, group.stage.count, on_cuda=device.type != "cpu")
    ranks = _ranks_of(speculation, group)
    started = time.perf_counter()
    if speculation.method == "self":
        drafter: Model = _copy_of(target, speculation.model, ranks)
    else:
        drafter = _load(speculation, config, target, limits, device, ranks)
    seconds = time.perf_counter() - started
    name = speculation.model or speculation.method
    logger.info("%s drafts: weights of %s, ready in %.1f s", name, mib(own_bytes(drafter, target)), seconds)
    return drafter


def copy_for_later(target: Model, device: torch.device, group: Group) -> OwnModel | None:
    """Returns a copy that is rounded while no request waits (`IdleSelfDraft`), if memory allows it and the model would
    read less."""
    if not isinstance(target, OwnModel) or group.size > 1:
        return None
    own, replaced = saved_bytes(target, drafts.DEFAULT_BITS)
    if replaced <= _LEAST_SAVED * target.weight_bytes:
        return None
    if own > (most := int(_MOST_OF_MEMORY * memory.available_bytes(device))):
        logger.info("no copy of the model drafts: in 4 bits it takes %s, and may take %s here", mib(own), mib(most))
        return None
    logger.info(
        "a copy of the model in %d bits drafts, too; it takes %s and is made while no request waits",
        drafts.DEFAULT_BITS,
        mib(own),
    )
    return shared_copy(target)


def own_bytes(drafter: Model, target: Model) -> int:
    """Returns the bytes of weights that the drafter does not share with the target."""
    if not isinstance(drafter, OwnModel) or not isinstance(target, OwnModel):
        return drafter.weight_bytes
    known = {tensor.data_ptr() for tensor, _ in twins(target, target)}
    parts = [part for module in drafter.modules() for part in module.parts]
    own = [part for part in parts if any(tensor.data_ptr() not in known for tensor, _ in twins(part, part))]
    vectors = [vector for vector in drafter.vectors().values() if vector.data_ptr() not in known]
    return sum(part.nbytes for part in own) + sum(vector.nbytes for vector in vectors)


def _ranks_of(speculation: Speculation, group: Group) -> Communicator:
    """Returns the ranks that split the layers of the drafter."""
    default = drafts.possible_ranks(speculation.method, group.tensor.size)[-1]
    return group.tensor if (speculation.draft_tensor_parallel_size or default) == group.tensor.size else ALONE


def _copy_of(target: Model, name: str, ranks: Communicator) -> OwnModel:
    if not isinstance(target, OwnModel):
        raise StartupError(
            f"--speculative-config: {name}: {target.config.architecture} runs in transformers' code, which is not "
            "quantized here; use another method, such as ngram"
        )
    return quantized_copy(target, drafts.bits_of(name), ranks)


def _path_of(speculation: Speculation, config: ExecutorConfig) -> Path:
    if speculation.method == "mtp" and not speculation.model:
        return find_model(config)
    return resolve_model(
        speculation.model,
        speculation.revision or None,
        config.download_dir,
        config.accept_license,
        pickled=speculation.method == "eagle3",
    )


def check_drafters(speculation: Speculation | None, config: ExecutorConfig, group: Group) -> None:
    """Raises StartupError if ranks have different weights of the drafter, or RankLost."""
    if group.size > 1 and speculation is not None and speculation.method not in (*LOOKUP_METHODS, "self"):
        digest = "" if config.load_format == DUMMY else content_digest(_path_of(speculation, config))
        group.check_same("weights of the model that drafts", digest)


def _load(
    speculation: Speculation,
    config: ExecutorConfig,
    target: Model,
    limits: Limits,
    device: torch.device,
    ranks: Communicator,
) -> Model:
    path = _path_of(speculation, config)
    if speculation.method == "mtp":
        return load_mtp(path, config, target, device, ranks)
    if speculation.method == "eagle3":
        return load_head(path, target, limits.max_model_len, device)
    drafter = load_model(
        path,
        dtype=str(target.config.dtype).removeprefix("torch."),
        device=device,
        load_format=config.load_format,
        quantization=speculation.quantization or None,
        max_model_len=speculation.max_model_len or None,
        weights_cache=config.weights_cache or None,
        seed=config.seed or 0,
        tensor=ranks,
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
            f"{path}: {drafter.config.architecture} cannot draft: not all of its layers attend to earlier "
            "tokens; use another model"
        )
    return drafter
