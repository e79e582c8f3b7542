"""A model as its files describe it, for lists of models that were never loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.config import ServeConfig
from pagewire.flags.model_facts import ModelFacts

if TYPE_CHECKING:
    from pagewire.v1 import inference_pb2

_EMBED = ("Model", "ForMaskedLM")
_EMBED_GGUF = ("bert", "nomic-bert", "jina-bert-v2", "gemma-embedding")


def described(config: ServeConfig, name: str, facts: ModelFacts | None, size: int) -> inference_pb2.Model:
    """Returns the model, as far as it is known. size: bytes of the weights."""
    from pagewire.v1 import common_pb2, inference_pb2  # deferred: a stack starts its services first

    model = inference_pb2.Model(id=name, root=Path(config.model).name)
    if facts is None:
        return model
    model.max_model_len = config.max_model_len or facts.max_len
    is_gguf = facts.path.suffix == ".gguf"
    model.files.format = "gguf" if is_gguf else "safetensors"
    model.files.architecture, model.files.size_bytes = facts.architecture, size
    model.files.trained_len, model.files.num_layers = facts.max_len, facts.layers
    if config.convert == "classify" or facts.architecture.endswith("ForSequenceClassification"):
        model.kind = common_pb2.MODEL_KIND_CLASSIFY
    elif config.runner == "pooling" or _embeds(facts, is_gguf=is_gguf):
        model.kind = common_pb2.MODEL_KIND_EMBED
    else:
        model.kind = common_pb2.MODEL_KIND_UNSPECIFIED  # it generates text
        model.has_chat_template = bool(config.chat_template) or _has_template(facts.path, is_gguf=is_gguf)
    return model


def _embeds(facts: ModelFacts, *, is_gguf: bool) -> bool:
    if is_gguf:
        return facts.architecture in _EMBED_GGUF
    return facts.architecture.endswith(_EMBED) or (facts.path / "modules.json").is_file()


def _has_template(path: Path, *, is_gguf: bool) -> bool:
    if is_gguf:
        with path.open("rb") as file:
            return b"tokenizer.chat_template" in file.read(64 * 2**20)
    if (path / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
