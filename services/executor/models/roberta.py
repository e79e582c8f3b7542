"""RoBERTa and XLM-RoBERTa: BERT with positions that begin behind the padding token's, and a head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.bert import BertConfig, BertModel, bert_keys


def roberta_config(raw: Mapping[str, Any], dtype: torch.dtype) -> BertConfig:
    keys = bert_keys(raw, dtype)
    pad_token_id = raw.get("pad_token_id")
    first = (1 if pad_token_id is None else pad_token_id) + 1
    keys |= {"max_position_embeddings": keys["max_position_embeddings"] - first, "first_position": first}
    return BertConfig(**keys, prefix="roberta", head=("classifier.dense", "classifier.out_proj"))


ARCHITECTURES = tuple(
    Architecture(f"{family}{task}", model_type, roberta_config, BertModel, base="roberta.")
    for family, model_type in (("Roberta", "roberta"), ("XLMRoberta", "xlm-roberta"))
    for task in ("Model", "ForMaskedLM", "ForSequenceClassification")
)
