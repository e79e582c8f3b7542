"""Reads the MTP layer of a model's checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from pagewire.config import ExecutorConfig
from pagewire.process.process import usable_cores
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.device import memory
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.loading.check_tensors import check_tensors
from pagewire.services.executor.loading.checkpoint import DirectoryCheckpoint, open_checkpoint
from pagewire.services.executor.loading.config_file import parse_overrides
from pagewire.services.executor.loading.filler import MAX_THREADS, Filler
from pagewire.services.executor.loading.served_model import DUMMY
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.pack_dense import pack_dense, packs_dense
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.drafting.mtp import FORMS, MtpForm, MtpHead
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.communicator import ALONE, Communicator

_REMEDY = "use another method, such as ngram"


def load_mtp(
    path: Path, config: ExecutorConfig, target: Model, device: torch.device, tensor: Communicator = ALONE
) -> MtpHead:
    """Loads the layer. path: the target's checkpoint, or a checkpoint of the layer alone. tensor: the ranks that split
    the target's layers and this one. Raises ModelLoadError."""
    architecture = target.config.architecture
    form = FORMS.get(architecture)
    if form is None or not isinstance(target, DecoderModel):
        raise ModelLoadError(
            f"{path}: method mtp: {architecture} has no MTP layer that is known here, only {', '.join(sorted(FORMS))} "
            f"have; {_REMEDY}"
        )
    checkpoint = open_checkpoint(path, config.load_format, parse_overrides(config.hf_overrides))
    if not isinstance(checkpoint, DirectoryCheckpoint):
        raise ModelLoadError(f"{path}: method mtp: .gguf files are read without their MTP layers; {_REMEDY}")
    name = form.layer.format(target.config.num_layers)
    weights = None if config.load_format == DUMMY else checkpoint.weights()
    if not checkpoint.keys.get("num_nextn_predict_layers") or not _has_layer(weights, name):
        raise ModelLoadError(f"{path}: method mtp: the checkpoint has no MTP layer ({name}); {_REMEDY}")
    found = checkpoint.quantization(weights, config.quantization)
    placement = Placement(
        target.config.dtype, device, found, tensor=tensor, whole_experts=config.enable_expert_parallel
    )
    whole = _made(
        form, target, weights, replace(placement, device=torch.device("meta"), tensor=ALONE, whole_experts=False)
    )
    if weights is not None:
        check_tensors(path, weights, whole)
    memory.check_weights_fit(whole.weight_bytes // tensor.size, device)
    head = _made(form, target, weights, placement)
    threads = min(MAX_THREADS[device.type], usable_cores())
    filler = Filler(head, device, config.quantization == "none", threads, lambda fraction, text: None)
    if weights is None:
        filler.fill_randomly(config.seed or 0)
    else:
        filler.read(path, weights)
    if packs_dense(target.config.dtype, device):
        pack_dense(head)
    head.finish_loading()
    return head


def _has_layer(weights: WeightSource | None, name: str) -> bool:
    return weights is None or any(tensor.startswith(f"{name}.") for tensor in weights.shapes)


def _made(form: MtpForm, target: DecoderModel, weights: WeightSource | None, placement: Placement) -> MtpHead:
    """Returns whether the projection is dense, which is possible in a quantized checkpoint."""
    projection = f"{form.layer.format(target.config.num_layers)}.{form.projection}."
    stored = set() if weights is None else {name for name in weights.shapes if name.startswith(projection)}
    return MtpHead(form, target, placement, is_dense=stored == {f"{projection}weight"})
