"""Models served for vectors: what the executor makes of sentence-transformers' files and flags, on real steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from pagewire.config import ExecutorConfig
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.graph_capture import capture_graphs
from pagewire.services.executor.start.startup import start_runner
from pagewire.services.executor.step.dummy_step import DUMMY_SAMPLING
from pagewire.services.executor.step.step import Blocks, NewRequest, Step
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.stepping import graph_steps
from tests.services.executor.models.test_encoders import inputs, save, texts_and_pairs
from tests.services.executor.models.tiny import save_tiny

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"}
TEXTS, SECONDS = texts_and_pairs(has_pairs=True)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_modules(path: Path, pooling: dict[str, Any], *following: dict[str, str]) -> None:
    write(path / "modules.json", [TRANSFORMER, POOLING, *following])
    write(path / "1_Pooling" / "config.json", pooling)


def start(path: Path, **flags: Any) -> tuple[ModelRunner, ExecutorInfo]:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    config = ExecutorConfig(model=str(path), **(options | flags))
    return start_runner(config, str(path), lambda fraction, text: None)


def vectors(runner: ModelRunner, texts: list[list[int]], seconds: list[int] | None = None) -> Tensor:
    """Returns the vectors of all texts, in one step."""
    seconds = seconds or [0] * len(texts)
    blocks = [-(-len(text) // 4) for text in texts]
    starts = np.cumsum([0, *blocks])
    runner.reset()
    output = runner.execute(
        Step(
            step_id=1,
            request_ids=list(range(len(texts))),
            num_scheduled_tokens=np.array([len(text) for text in texts]),
            num_new_blocks=np.zeros((len(texts), len(runner.kv_groups)), dtype=np.int64),
            new_block_ids=np.empty(0, dtype=np.int32),
            new_requests=[
                NewRequest(
                    request_id=index,
                    token_ids=np.array(text, dtype=np.int32),
                    num_prompt_tokens=len(text),
                    num_computed_tokens=0,
                    blocks=[
                        Blocks(0, np.arange(starts[index], starts[index] + blocks[index], dtype=np.int32))
                        for _ in runner.kv_groups
                    ],
                    sampling=DUMMY_SAMPLING,
                    yields_vector=True,
                    second_text_start=seconds[index],
                )
                for index, text in enumerate(texts)
            ],
        )
    )
    found = output.wait().vectors
    assert found is not None
    return torch.from_numpy(found)


def weighted(states: Tensor) -> Tensor:
    weights = torch.arange(1.0, len(states) + 1)[:, None]
    return (states * weights).sum(0) / weights.sum()


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda states: states[0],
    "max": lambda states: states.max(0).values,
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": weighted,
    "lasttoken": lambda states: states[-1],
}


@torch.inference_mode()
def test_every_way_to_pool(tmp_path: Path) -> None:
    """All side by side, then a layer and the normalisation; a step twice, as it is replayed then."""
    reference = save(tmp_path, "Bert", "Model")
    write_modules(tmp_path, {"pooling_mode": list(POOLS)}, DENSE, NORMALIZE)
    weight, bias = torch.randn(7, 48 * len(POOLS)), torch.randn(7)
    write(tmp_path / "2_Dense" / "config.json", {"activation_function": "torch.nn.modules.activation.Tanh"})
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 50})
    runner, info = start(tmp_path)
    assert (info.kind, info.vector_size, info.max_model_len, info.whole_prompts) == ("embed", 7, 50, True)
    assert info.kv_cache_bytes == 0
    states = [reference(**inputs(*text)).last_hidden_state[0] for text in zip(TEXTS, SECONDS, strict=True)]
    pooled = torch.stack([torch.cat([pool(state) for pool in POOLS.values()]) for state in states])
    expected = functional.normalize((pooled @ weight.T + bias).tanh(), dim=-1)
    for _ in range(2):
        torch.testing.assert_close(vectors(runner, TEXTS, SECONDS), expected, atol=1e-4, rtol=1e-4)
    capture_graphs(runner, (), lambda fraction, text: None, ReplayedFunction, prompts=(128,))
    replayed = graph_steps("replayed")
    torch.testing.assert_close(vectors(runner, TEXTS, SECONDS), expected, atol=1e-4, rtol=1e-4)
    assert graph_steps("replayed") == replayed + 1


def test_a_prompt_in_one_step_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A long context takes no memory by default."""
    save(tmp_path, "ModernBert", "Model", max_position_embeddings=32_768)

    def limits(**settings: Any) -> tuple[int, int]:
        caplog.clear()
        _, info = start(tmp_path, **settings)
        return info.max_model_len, info.max_num_batched_tokens

    assert limits() == (8192, 8192)
    assert "ModernBertModel reads a prompt in one step of up to 8192 tokens" in caplog.text
    assert "(the model takes 32768); raise --max-num-batched-tokens" in caplog.text
    assert limits(max_model_len=9000) == (9000, 9000) and not caplog.records
    assert limits(max_num_batched_tokens=100, max_model_len=9000) == (100, 100)
    assert "of up to 100 tokens" in caplog.text
    assert limits(max_model_len=50) == (50, 2048)


@torch.inference_mode()
def test_old_pooling_keys_and_no_files_at_all(tmp_path: Path) -> None:
    reference = save(tmp_path, "ModernBert", "Model")
    states = [reference(**inputs(text, 0)).last_hidden_state[0] for text in TEXTS]
    mean = torch.stack([state.mean(0) for state in states])
    torch.testing.assert_close(
        vectors(start(tmp_path)[0], TEXTS), functional.normalize(mean, dim=-1), atol=1e-4, rtol=1e-4
    )
    write_modules(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    first = torch.stack([state[0] for state in states])
    torch.testing.assert_close(vectors(start(tmp_path)[0], TEXTS), first, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("strip", [False, True])
def test_a_decoder_that_embeds(tmp_path: Path, strip: bool) -> None:
    """Tests a model like Qwen3-Embedding, with tensors without a prefix: the last token's state, normalised."""
    reference = save_tiny(tmp_path, "Qwen3", tie_word_embeddings=True, head_dim=8)
    if strip:
        reference.model.save_pretrained(tmp_path)
        write(tmp_path / "config.json", reference.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, NORMALIZE)
    runner, info = start(tmp_path)
    assert (info.kind, info.whole_prompts) == ("embed", False)
    states = [reference.model(torch.tensor([text])).last_hidden_state[0, -1] for text in TEXTS]
    expected = functional.normalize(torch.stack(states), dim=-1)
    torch.testing.assert_close(vectors(runner, TEXTS), expected, atol=1e-4, rtol=1e-4)
    capture_graphs(runner, (), lambda fraction, text: None, ReplayedFunction, prompts=(32, 128))
    replayed = graph_steps("replayed")
    torch.testing.assert_close(vectors(runner, TEXTS), expected, atol=1e-4, rtol=1e-4)
    assert graph_steps("replayed") == replayed + 1
    assert start(tmp_path, runner="generate")[1].kind == "generate"


@torch.inference_mode()
@pytest.mark.parametrize(
    ("keys", "scores"),
    [
        ({"num_labels": 1}, torch.sigmoid),
        ({"num_labels": 3}, lambda logits: logits.softmax(-1)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 1, "problem_type": "regression"}, lambda logits: logits),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
    ],
)
def test_scores(tmp_path: Path, keys: dict[str, Any], scores: Callable[[Tensor], Tensor]) -> None:
    reference = save(tmp_path, "Bert", "ForSequenceClassification", **keys)
    runner, info = start(tmp_path)
    assert (info.kind, info.vector_size) == ("classify", keys["num_labels"])
    assert info.labels == tuple(f"LABEL_{index}" for index in range(keys["num_labels"]))
    logits = torch.cat([reference(**inputs(*text)).logits for text in zip(TEXTS, SECONDS, strict=True)])
    torch.testing.assert_close(vectors(runner, TEXTS, SECONDS), scores(logits), atol=1e-4, rtol=1e-4)


def test_labels_are_those_of_the_overrides(tmp_path: Path) -> None:
    save(tmp_path, "Bert", "ForSequenceClassification", num_labels=2)
    _, info = start(tmp_path, hf_overrides='{"id2label": {"0": "good", "1": "bad"}}')
    assert info.labels == ("good", "bad")


def test_a_step_takes_the_longest_prompt_or_prompts_are_shorter(tmp_path: Path) -> None:
    save(tmp_path, "Bert", "Model", max_position_embeddings=4096)
    runner, _ = start(tmp_path, load_format="dummy")
    assert (runner.limits.max_num_batched_tokens, runner.limits.max_model_len) == (4096, 4096)
    runner, _ = start(tmp_path, load_format="dummy", max_num_batched_tokens=100)
    assert (runner.limits.max_num_batched_tokens, runner.limits.max_model_len) == (100, 100)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ({"runner": "generate"}, "BertModel generates no text"),
        ({"convert": "classify"}, "no classification head"),
    ],
)
def test_flags_that_do_not_fit_the_model(tmp_path: Path, flags: dict[str, str], cause: str) -> None:
    save(tmp_path, "Bert", "Model")
    with pytest.raises(ModelLoadError, match=cause):
        start(tmp_path, **flags)


@pytest.mark.parametrize(
    ("pooling", "following", "cause"),
    [
        ({"pooling_mode": "attention"}, [], "attention"),
        ({}, [], "pooling modes"),
        ({"pooling_mode": 5}, [], "pooling modes"),
        ({"pooling_mode": "mean", "include_prompt": False}, [], "include_prompt"),
        ({"pooling_mode": "mean"}, [NORMALIZE, NORMALIZE | {"type": "x.Dense"}], "follows a normalisation"),
        ({"pooling_mode": "mean"}, [NORMALIZE | {"type": "x.LSTM"}], "LSTM"),
    ],
)
def test_modules_that_are_not_known(
    tmp_path: Path, pooling: dict[str, Any], following: list[dict[str, str]], cause: str
) -> None:
    save(tmp_path, "Bert", "Model")
    write_modules(tmp_path, pooling, *following)
    with pytest.raises(ModelLoadError, match=cause):
        start(tmp_path)


@pytest.mark.parametrize(
    ("activation", "outputs", "cause"),
    [(["Tanh"], 7, "activation_function"), ("torch.nn.modules.linear.Identity", 6, "linear.bias")],
)
def test_a_layer_that_does_not_fit(tmp_path: Path, activation: Any, outputs: int, cause: str) -> None:
    save(tmp_path, "Bert", "Model")
    write_modules(tmp_path, {"pooling_mode": "mean"}, DENSE)
    write(tmp_path / "2_Dense" / "config.json", {"activation_function": activation})
    tensors = {"linear.weight": torch.zeros(7, 48), "linear.bias": torch.zeros(outputs)}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"2_Dense.*{cause}"):
        start(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("id2label", ["no", "yes"]), ("sentence_transformers", "x"), ("sbert_ce_default_activation_function", {"a": 1})],
)
def test_a_classifiers_keys_of_wrong_types(tmp_path: Path, key: str, value: Any) -> None:
    save(tmp_path, "Bert", "ForSequenceClassification", num_labels=2)
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", config | {key: value})
    with pytest.raises(ModelLoadError, match=r"config\.json: "):
        start(tmp_path)
