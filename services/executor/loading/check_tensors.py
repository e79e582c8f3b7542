"""Checks that a checkpoint has the tensors that a model needs, before any is read."""

from __future__ import annotations

from pathlib import Path

import torch

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.loading.quantization.install import check_shard, tensor_specs
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.kv_scales import is_attention_scale
from pagewire.services.executor.loading.weights.prefix import HEADS
from pagewire.services.executor.models.protocol import OwnModel


def check_tensors(path: Path, weights: WeightSource, model: OwnModel) -> int:
    """Returns the bytes to read of quantized tensors.

    Raises ModelLoadError naming tensors missing, unexpected or of a wrong shape.
    """
    parts = model.stored_parts()
    shapes = {
        name: parts[name].shape if name in parts else tuple(target.shape)
        for name, target in model.load_targets().items()
    }
    missing: list[str] = []
    quantized: dict[str, float] = {}  # name -> share to read
    for shard in (shard for module in model.quantized_modules() for shard in module.shards):
        if shard.format is None:
            shapes[f"{shard.name}.weight"] = (shard.out_features, shard.in_features)
            continue
        try:
            missing += check_shard(weights, shard)
            suffixes = tensor_specs(shard)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        names = [f"{shard.name}.{suffix}" for suffix in suffixes]
        quantized |= {name: shard.share for name in names if name in weights.shapes}
    missing += [name for name in shapes if name not in weights.shapes]
    known = {*shapes, *quantized}
    unexpected = [
        name
        for name in weights.shapes
        if name not in known and not model.ignored(name) and not is_attention_scale(name)
    ]
    if missing or unexpected:
        raise ModelLoadError(
            f"{path}: the checkpoint does not fit its config: {_listing('missing', missing)}"
            f"{'; ' if missing and unexpected else ''}{_listing('unexpected', unexpected)}; "
            f"{_remedy(missing)}"
        )
    for name, shape in shapes.items():
        if weights.shapes[name] != shape:
            raise ModelLoadError(
                f"{path}: tensor {name}: expected shape {list(shape)}, found {list(weights.shapes[name])}"
            )
    return int(sum(weights.stored_bytes(name) * share for name, share in quantized.items()))


def has_own_head(model: OwnModel, weights: WeightSource) -> bool:
    """Returns whether a checkpoint that claims to share its embedding with its head has another head, as transformers
    does."""
    embedding = next((leaf for leaf in model.leaves() if isinstance(leaf, Embedding) and leaf.multiplies), None)
    head = next((name for name in weights.shapes if name.endswith(tuple(f"{head}.weight" for head in HEADS))), None)
    if embedding is None or head is None:
        return False
    name = f"{embedding.shards[0].name}.weight"
    if name not in weights.shapes or weights.shapes[head] != weights.shapes[name]:
        return False
    one, other = weights.raw(head), weights.raw(name)
    return one.dtype is not other.dtype or not torch.equal(one, other)


def _remedy(missing: list[str]) -> str:
    if missing == ["lm_head.weight"]:
        return (
            "the model was saved without its head; if that is its embedding, add "
            """--hf-overrides '{"tie_word_embeddings": true}'"""
        )
    return "download it again, or use the config.json that belongs to it"


def _listing(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} {kind}: {', '.join(names[:5])}{more}"
