"""Whether a checkpoint has the tensors that a model needs, before any is read."""

from __future__ import annotations

from pathlib import Path

import torch

from pagewire.services.executor.loading.quantization.install import check_shard, tensor_specs
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.kv_scales import is_attention_scale
from pagewire.services.executor.model_config import ModelConfig, ModelLoadError
from pagewire.services.executor.models.protocol import OwnModel

_COMPARED_ROWS = 2048  # of the first, and of the last


def check_tensors(path: Path, weights: WeightSource, model: OwnModel) -> int:
    """Bytes of quantized tensors. Raises ModelLoadError naming tensors missing, unexpected or of a wrong shape."""
    targets = dict(model.load_targets())
    missing: list[str] = []
    quantized: list[str] = []
    for shard in (shard for module in model.quantized_modules() for shard in module.shards):
        if shard.format is None:
            targets[f"{shard.name}.weight"] = torch.empty(shard.out_features, shard.in_features, device="meta")
            continue
        try:
            missing += check_shard(weights, shard)
            suffixes = tensor_specs(shard)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from error
        quantized += [name for suffix in suffixes if (name := f"{shard.name}.{suffix}") in weights.shapes]
    missing += [name for name in targets if name not in weights.shapes]
    known = {*targets, *quantized}
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
    for name, target in targets.items():
        if weights.shapes[name] != tuple(target.shape):
            raise ModelLoadError(
                f"{path}: tensor {name}: expected shape {list(target.shape)}, found {list(weights.shapes[name])}"
            )
    return sum(weights.stored_bytes(name) for name in quantized)


def has_own_head(config: ModelConfig, weights: WeightSource) -> bool:
    """Whether a checkpoint that claims to share its embedding with its head has another head, as transformers tells.

    Some rows are compared, to read little of both: every 64th, and the first and last thousands, among which added
    tokens are.
    """
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not config.tie_word_embeddings or not {head, embedding} <= weights.shapes.keys():
        return False
    if weights.shapes[head] != weights.shapes[embedding]:
        return False
    one, other = weights.raw(head), weights.raw(embedding)
    rows = (slice(_COMPARED_ROWS), slice(-_COMPARED_ROWS, None), slice(None, None, 64))
    return any(not torch.equal(one[part], other[part]) for part in rows)


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
