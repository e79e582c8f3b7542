"""Encoders against transformers' on tiny random checkpoints: hidden states and scores, several texts in a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.pooling import Spans
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.step.step_context import StepContext
from tests.services.executor.models.tiny import CPU, load

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
TASKS = {
    "Model": AutoModel,
    "ForMaskedLM": AutoModelForMaskedLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}
LENGTHS = (9, 1, 40, 23)
TYPES = {"Bert": 2, "Roberta": 1, "XLMRoberta": 1}  # token types; ModernBERT has none


def save(path: Path, family: str, task: str, **overrides: Any) -> Any:
    torch.manual_seed(0)
    types = {"type_vocab_size": TYPES[family]} if family in TYPES else {"local_attention": 10}
    modern = {"cls_token_id": 0, "sep_token_id": 2} if family == "ModernBert" else {}
    config = getattr(transformers, f"{family}Config")(**(SIZES | types | modern | overrides))
    model = TASKS[task].from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases away from their neutral start values
            torch.nn.init.normal_(parameter, 1.0 if name.lower().endswith("norm.weight") else 0.0, 0.3)
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def run(model: Model, texts: list[list[int]], second_text_starts: list[int]) -> tuple[Tensor, Spans]:
    """All in one step."""
    lengths = np.array([len(text) for text in texts])
    context = StepContext(
        positions=torch.cat([torch.arange(length) for length in lengths]),
        rows=torch.arange(len(texts), dtype=torch.int32),
        query_start_loc=torch.tensor([0, *lengths.cumsum()]).int(),
        seq_lens=torch.from_numpy(lengths).int(),
        block_tables=(),
        slot_mappings=(),
        max_query_len=int(lengths.max()),
        second_text_start=torch.tensor([start or 1 << 62 for start in second_text_starts]),
    )
    input_ids = torch.tensor([token for text in texts for token in text])
    return model.forward(input_ids, context), Spans.of(lengths, np.arange(len(texts)), CPU)


def texts_and_pairs(has_pairs: bool) -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(3, 67, (length,), generator=generator).tolist() for length in LENGTHS]
    return texts, [4, 0, 17, 0] if has_pairs else [0] * len(texts)


def inputs(text: list[int], second_text_start: int) -> dict[str, Tensor]:
    """Returns the arguments of transformers' model."""
    given = {"input_ids": torch.tensor([text])}
    if second_text_start:
        given["token_type_ids"] = (torch.arange(len(text)) >= second_text_start).long()[None]
    return given


@pytest.mark.architecture("BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel")
@pytest.mark.architecture("BertForMaskedLM", "RobertaForMaskedLM", "XLMRobertaForMaskedLM", "ModernBertForMaskedLM")
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta", "ModernBert"])
@torch.inference_mode()
def test_hidden_states(tmp_path: Path, family: str, task: str) -> None:
    expected = save(tmp_path, family, task)
    texts, starts = texts_and_pairs(family == "Bert")
    hidden, _ = run(load(tmp_path), texts, starts)
    for text, start, ours in zip(texts, starts, hidden.split([len(text) for text in texts]), strict=True):
        states = expected(**inputs(text, start), output_hidden_states=True).hidden_states[-1][0]
        if family == "ModernBert":  # its hidden states are without the last norm
            states = expected.base_model(**inputs(text, start)).last_hidden_state[0]
        assert states.std() > 0.1, "the tiny model must distinguish tokens"
        torch.testing.assert_close(ours, states, atol=1e-4, rtol=1e-4)


@pytest.mark.architecture("BertForSequenceClassification", "RobertaForSequenceClassification")
@pytest.mark.architecture("XLMRobertaForSequenceClassification", "ModernBertForSequenceClassification")
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Bert", {}),
        ("Roberta", {}),
        ("XLMRoberta", {}),
        ("ModernBert", {"classifier_pooling": "mean", "norm_bias": True, "mlp_bias": True, "attention_bias": True}),
        ("ModernBert", {"classifier_bias": True}),
    ],
)
@torch.inference_mode()
def test_class_logits(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    expected = save(tmp_path, family, "ForSequenceClassification", num_labels=3, **keys)
    model = load(tmp_path)
    texts, starts = texts_and_pairs(family == "Bert")
    hidden, spans = run(model, texts, starts)
    assert model.classifier is not None
    logits = torch.cat([expected(**inputs(text, start)).logits for text, start in zip(texts, starts, strict=True)])
    torch.testing.assert_close(model.classifier.classify(hidden, spans), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "mish"}, "mish"),
        ({"num_attention_heads": 7}, "multiple"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, keys: dict[str, Any], cause: str) -> None:
    save(tmp_path, "Bert", "Model")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))
    with pytest.raises(ModelLoadError, match=cause):
        load(tmp_path)
