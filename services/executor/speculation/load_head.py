"""Reads the checkpoint of an EAGLE-3 head."""

from __future__ import annotations

from pathlib import Path

import torch

from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.loading.check_tensors import check_tensors
from pagewire.services.executor.loading.config_file import read_json
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.model_config import ModelLoadError, required
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.eagle3 import Eagle3Head
from pagewire.services.executor.models.protocol import Model

_TABLES = ("d2t", "t2d")  # draft id -> what is to be added for the target's; whether a target's id has a draft id


def load_eagle3(path: Path, target: Model, max_model_len: int, device: torch.device) -> Eagle3Head:
    """path: a directory with config.json and safetensors. Raises ModelLoadError."""
    if not isinstance(target, CausalModel) or type(target).through is not CausalModel.through:
        raise ModelLoadError(
            f"{path}: {target.config.architecture} does not show what its layers compute, from which EAGLE-3 drafts; "
            "use another method, such as ngram"
        )
    raw, weights = read_json(path / "config.json"), SafetensorsSource(path)
    for key, expected in (("vocab_size", target.config.vocab_size), ("hidden_size", target.config.hidden_size)):
        if (found := required(raw, key)) != expected:
            raise ModelLoadError(
                f"{path}: {key} is {found}, that of the model it is to draft for {expected}: use the head of this model"
            )
    weights.rename({name: _name(name) for name in weights.shapes})
    placement = Placement(target.config.dtype, device)
    head = Eagle3Head(raw, target, max_model_len, placement)
    if "embed_tokens.weight" in weights.shapes:
        head.add_embedding(placement)
    tables = {name: weights.raw(name) for name in _TABLES if name in weights.shapes}
    for name in tables:
        del weights.shapes[name]
    check_tensors(path, weights, head)
    for name, memory in head.load_targets().items():
        host = torch.empty(memory.shape, dtype=memory.dtype)
        weights.read_into(name, host)
        memory.copy_(host)
    if "d2t" in tables:
        head.token_ids += tables["d2t"].to(device)
    return head


def _name(stored: str) -> str:
    """That of the first checkpoints; later ones call the layer as other models do."""
    return f"midlayer.{stored.removeprefix('layers.0.')}" if stored.startswith("layers.0.") else stored
