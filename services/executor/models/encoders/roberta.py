"""RoBERTa and XLM-RoBERTa: BERT with positions that begin behind the padding token's, and a different head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.encoders.bert import (
    GGUF_NUMBERS,
    OLD_NORMS,
    BertConfig,
    BertModel,
    bert_keys,
    gguf_names,
    gguf_token_types,
    has_roberta_head,
)


def roberta_config(raw: Mapping[str, Any], dtype: torch.dtype) -> BertConfig:
    keys = bert_keys(raw, dtype)
    pad_token_id = raw.get("pad_token_id")
    first = raw.get("first_position", (1 if pad_token_id is None else pad_token_id) + 1)
    keys |= {"max_position_embeddings": keys["max_position_embeddings"] - first, "first_position": first}
    return BertConfig(**keys, prefix="roberta", head=("classifier.dense", "classifier.out_proj"))


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Accounts for the converter, which omits the rows of positions up to the padding token's."""
    return {**gguf_token_types(stated), "first_position": 0, "num_labels": stated["cls.output.weight"][0]}


# With a head; without one llama.cpp does not distinguish BERT from RoBERTa.
_GGUF = GgufForm(
    "bert",
    layers="roberta.encoder.layer",
    names={**gguf_names("roberta"), "cls": "classifier.dense", "cls.output": "classifier.out_proj"},
    numbers=GGUF_NUMBERS,
    when=has_roberta_head,
    derived_keys=_gguf_keys,
)

ARCHITECTURES = tuple(
    Architecture(
        f"{family}{task}",
        model_type,
        roberta_config,
        BertModel,
        _GGUF if task == "ForSequenceClassification" else None,
        base="roberta.",
        aliases=OLD_NORMS,
    )
    for family, model_type in (("XLMRoberta", "xlm-roberta"), ("Roberta", "roberta"))
    for task in ("Model", "ForMaskedLM", "ForSequenceClassification")
)
