"""GGUF files of BERT and of decoders that make vectors: states, and how they are pooled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from pagewire.services.executor.config.model_config import ModelLoadError
from tests.services.executor.loading.weights.converted import write
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.models.test_encoders import inputs, run, save, texts_and_pairs
from tests.services.executor.models.tiny import load
from tests.services.executor.runner.test_pooling import start, vectors

TEXTS, SECONDS = texts_and_pairs(has_pairs=True)
POOLS = {1: lambda states: states.mean(0), 2: lambda states: states[0], 3: lambda states: states[-1]}


def write_bert(directory: Path, family: str = "Bert", **metadata: Any) -> tuple[Path, PreTrainedModel]:
    expected: PreTrainedModel = save(directory / "saved", family, "Model")
    first = 0 if family == "Bert" else 2  # RoBERTa's converter leaves out the rows of positions that are not used
    positions = expected.state_dict()["embeddings.position_embeddings.weight"].numpy()[first:]
    tensors: dict[str, np.ndarray | None] = {"position_embd.weight": positions}
    length = {"context_length": 64 - first, "attention__head_count_kv": None}
    path = write(directory / "tiny.gguf", expected, "bert", tensors, attention__causal=False, **(length | metadata))
    return path, expected


def pooled(expected: PreTrainedModel, number: int, seconds: list[int]) -> Tensor:
    states = [
        expected(**inputs(text, second)).last_hidden_state[0] for text, second in zip(TEXTS, seconds, strict=True)
    ]
    return functional.normalize(torch.stack([POOLS[number](rows) for rows in states]), dim=-1)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_hidden_states(tmp_path: Path, family: str) -> None:
    path, expected = write_bert(tmp_path, family)
    seconds = SECONDS if family == "Bert" else [0] * len(TEXTS)
    hidden, _ = run(load(path), TEXTS, seconds)
    for text, second, ours in zip(TEXTS, seconds, hidden.split([len(text) for text in TEXTS]), strict=True):
        states = expected(**inputs(text, second)).last_hidden_state[0]
        torch.testing.assert_close(ours, states, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("number", "pool"), [(None, 1), (0, 1), (1, 1), (2, 2)])
def test_a_stated_pooling(tmp_path: Path, number: int | None, pool: int) -> None:
    path, expected = write_bert(tmp_path, pooling_type=number)
    runner, info = start(path)
    assert (info.kind, info.vector_size, info.whole_prompts) == ("embed", 48, True)
    torch.testing.assert_close(vectors(runner, TEXTS, SECONDS), pooled(expected, pool, SECONDS), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_decoder_with_a_stated_pooling_makes_vectors(tmp_path: Path) -> None:
    expected = tiny_model("Qwen3", head_dim=16)
    path = write(tmp_path / "tiny.gguf", expected, "qwen3", attention__key_length=16, pooling_type=3)
    runner, info = start(path)
    assert info.kind == "embed"
    torch.testing.assert_close(vectors(runner, TEXTS), pooled(expected.model, 3, [0] * 4), atol=1e-4, rtol=1e-4)
    assert start(path, runner="generate")[1].kind == "generate"


@torch.inference_mode()
@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_head_scores(tmp_path: Path, family: str, num_labels: int) -> None:
    expected = save(tmp_path / "saved", family, "ForSequenceClassification", num_labels=num_labels)
    positions = expected.state_dict()["roberta.embeddings.position_embeddings.weight"].numpy()[2:]
    metadata: dict[str, Any] = {"context_length": 62, "attention__head_count_kv": None, "pooling_type": 4}
    path = write(tmp_path / "tiny.gguf", expected, "bert", {"position_embd.weight": positions}, **metadata)
    runner, info = start(path)
    assert (info.kind, len(info.labels)) == ("classify", num_labels)
    logits = torch.cat([expected(torch.tensor([text])).logits for text in TEXTS])
    scores = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
    torch.testing.assert_close(vectors(runner, TEXTS), scores, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"token_types.weight": None}, {}, r"tensor token_types\.weight is missing; convert the model again"),
        (
            {"cls.output.weight": np.zeros((1, 48), np.float32)},
            {},
            r"classifier without .*cls\.weight\); use safetensors",
        ),
        ({}, {"pooling_type": 4}, r"classifier without .*cls\.weight\); use safetensors"),
        ({}, {"pooling_type": 5}, r"metadata key bert\.pooling_type is 5: not one of 0, 1, 2, 3, 4; use a model"),
        ({"blk.1.ffn_up.bias": None}, {}, r"missing: bert\.encoder\.layer\.1\.intermediate\.dense\.bias"),
    ],
)
def test_files_that_lack_something(
    tmp_path: Path, tensors: dict[str, np.ndarray | None], metadata: dict[str, Any], message: str
) -> None:
    expected = save(tmp_path / "saved", "Bert", "Model")
    metadata = {"attention__head_count_kv": None, **metadata}
    path = write(tmp_path / "tiny.gguf", expected, "bert", tensors, **metadata)
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf: .*{message}"):
        load(path)
