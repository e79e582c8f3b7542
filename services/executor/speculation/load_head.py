"""Reads the checkpoint of an EAGLE or EAGLE-3 head."""

from __future__ import annotations

from pathlib import Path

import torch

from pagewire.services.executor.config.model_config import ModelLoadError, required
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.loading.check_tensors import check_tensors
from pagewire.services.executor.loading.config_file import read_json
from pagewire.services.executor.loading.weights.pack_dense import pack_dense, packs_dense
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.loading.weights.torch_file import TorchFileSource
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.dense.gemma2 import GemmaModel
from pagewire.services.executor.models.drafting.eagle import EagleHead
from pagewire.services.executor.models.drafting.eagle3 import TABLES, Eagle3Head
from pagewire.services.executor.models.protocol import Model

# A head without them reads the embedding and one output of the model (EAGLE).
_OF_EAGLE_3 = ("midlayer.", "layers.0.hidden_norm.", *TABLES)


def load_head(path: Path, target: Model, max_model_len: int, device: torch.device) -> EagleHead | Eagle3Head:
    """Loads a head. path: a directory with config.json, and safetensors or pytorch_model.bin. Raises ModelLoadError."""
    if not isinstance(target, CausalModel | GemmaModel):
        raise ModelLoadError(
            f"{path}: {target.config.architecture} does not show what it computes, from which EAGLE heads draft; use "
            "another method, such as ngram"
        )
    raw, weights = read_json(path / "config.json"), _weights(path)
    for key, expected in (("vocab_size", target.config.vocab_size), ("hidden_size", target.config.hidden_size)):
        if (found := required(raw, key)) != expected:
            raise ModelLoadError(
                f"{path}: {key} is {found}, that of the model it is to draft for {expected}: use the head of this model"
            )
    placement = Placement(target.config.dtype, device)
    head: EagleHead | Eagle3Head
    if any(name.startswith(_OF_EAGLE_3) for name in weights.shapes):
        if isinstance(target, CausalModel) and type(target).through is not CausalModel.through:
            raise ModelLoadError(
                f"{path}: {target.config.architecture} does not show what its layers compute, from which EAGLE-3 "
                "drafts; use another method, such as ngram"
            )
        weights.rename({name: _name(name) for name in weights.shapes})
        head = Eagle3Head(raw, target, max_model_len, placement)
    else:
        head = EagleHead(raw, target, max_model_len, placement, bias="fc.bias" in weights.shapes)
    if "embed_tokens.weight" in weights.shapes:
        head.add_embedding(placement)
    check_tensors(path, weights, head)
    for name, memory in head.load_targets().items():
        host = torch.empty(memory.shape, dtype=memory.dtype)
        weights.read_into(name, host)
        memory.copy_(host)
    if packs_dense(placement.dtype, device):
        pack_dense(head)
    if isinstance(head, Eagle3Head) and "d2t" in weights.shapes:
        head.token_ids += weights.raw("d2t").to(device)
    return head


def _weights(path: Path) -> SafetensorsSource | TorchFileSource:
    """Returns the source of the weights: most early heads were only saved in torch's format."""
    file = path / "pytorch_model.bin"
    return TorchFileSource(file) if file.is_file() and not any(path.glob("*.safetensors")) else SafetensorsSource(path)


def _name(stored: str) -> str:
    """Returns the tensor's name in the first EAGLE-3 checkpoints; later ones use the usual name."""
    return f"midlayer.{stored.removeprefix('layers.0.')}" if stored.startswith("layers.0.") else stored
