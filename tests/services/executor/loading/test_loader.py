"""Loading Hugging Face directories: formats, dtypes, stop tokens, progress, and what each broken one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.protocol import Model
from tests.services.executor.loading.dense_weights import dense_tensors, padding_bytes
from tests.services.executor.models.test_models import CPU, assert_same_logits, load, save_tiny


def edit_config(path: Path, **changes: Any) -> None:
    """Sets keys of config.json; the value ... removes one."""
    file = path / "config.json"
    config = {key: value for key, value in (json.loads(file.read_text()) | changes).items() if value is not ...}
    file.write_text(json.dumps(config))


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors; dots in names are written as two underscores."""
    file = path / "model.safetensors"
    tensors: dict[str, Any] = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path / "single", "Llama")
    expected.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_same_logits(load(tmp_path / "sharded"), expected)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path / "single", "Llama").save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    shard = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"missing: {shard.name}"):
        load(tmp_path / "sharded")


def test_progress_rises_to_one_and_names_tensors(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    reports: list[tuple[float, str]] = []
    load(tmp_path, progress=lambda fraction, text: reports.append((fraction, text)))
    fractions = [fraction for fraction, _ in reports]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)
    assert "model.layers.2.self_attn.k_proj.weight" in [text for _, text in reports]


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        ("float32", "auto", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "float16", torch.float16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_dtype(tmp_path: Path, stored: str, asked: str, expected: torch.dtype) -> None:
    tiny = save_tiny(tmp_path / "float32", "Llama")
    tiny.to(getattr(torch, stored)).save_pretrained(tmp_path / stored)
    model = load_model(tmp_path / stored, dtype=asked, device=CPU)
    assert model.config.dtype == expected
    assert isinstance(model, DecoderModel)
    tensors = dense_tensors(model).values()
    assert {tensor.dtype for tensor in tensors if tensor.dim() > 1} == {expected}
    norms = [tensor for tensor in tensors if tensor.dim() == 1]
    assert {norm.dtype for norm in norms} == {torch.float32}, "as what they normalise"
    widened = sum(norm.numel() for norm in norms) * (4 - expected.itemsize)
    assert model.weight_bytes == tiny.num_parameters() * expected.itemsize + widened + padding_bytes(model)


def test_unknown_dtype(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    with pytest.raises(ModelLoadError, match="'int8' is not one of auto, bfloat16"):
        load_model(tmp_path, dtype="int8", device=CPU)


def test_a_stored_dtype_that_torch_does_not_know(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float33"}))
    with pytest.raises(ModelLoadError, match=r"config.json: key dtype: 'float33' is not a torch dtype"):
        load_model(tmp_path, dtype="auto", device=CPU)


def test_tied_embedding_is_held_once(tmp_path: Path) -> None:
    tiny = save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    assert load(tmp_path).weight_bytes == 4 * tiny.num_parameters()


def test_tied_checkpoint_may_repeat_the_head(tmp_path: Path) -> None:
    tiny = save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    edit_weights(tmp_path, lm_head__weight=tiny.lm_head.weight.detach().clone())
    assert_same_logits(load(tmp_path), tiny)


@pytest.mark.parametrize("model_impl", ["pagewire", "transformers"])
@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, ..., (2,)), ([2, 3], ..., (2, 3)), (2, 7, (7,)), (2, [7, 2], (7, 2)), (2, None, (2,)), (None, ..., ())],
)
def test_stop_tokens(
    tmp_path: Path, model_impl: str, config_eos: Any, generation_eos: Any, expected: tuple[int, ...]
) -> None:
    save_tiny(tmp_path, "Llama")
    edit_config(tmp_path, eos_token_id=config_eos)
    generation = tmp_path / "generation_config.json"
    generation.unlink(missing_ok=True)
    if generation_eos is not ...:
        generation.write_text(json.dumps({"eos_token_id": generation_eos}))
    assert load(tmp_path, model_impl=model_impl).config.eos_token_ids == expected


def test_the_tokenizers_end_token_counts_beside_the_configs(tmp_path: Path) -> None:
    """Fine-tuned chat models end their answers with a token that config.json may not know."""
    save_tiny(tmp_path, "Llama")
    edit_config(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "added_tokens.json").write_text('{"<|im_end|>": 9}')
    assert load(tmp_path).config.eos_token_ids == (2, 9)


def test_legacy_rope_keys(tmp_path: Path) -> None:
    """Configs from before transformers 5: rope_theta stood beside rope_scaling and its type was called `type`."""
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    expected = save_tiny(tmp_path, "Llama", rope_parameters=parameters)
    edit_config(tmp_path, rope_parameters=..., rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})
    assert_same_logits(load(tmp_path), expected)


@pytest.mark.parametrize("family", ["Llama", "StableLm"])
def test_dummy_weights_need_only_a_config(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    ids, positions = torch.tensor([1, 2, 3]), torch.arange(3)
    logits = [_first_logits(load(tmp_path, load_format="dummy", seed=seed), ids, positions) for seed in (0, 0, 1)]
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def _first_logits(model: Model, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    from tests.services.executor.helpers.paged_batch import PagedBatch

    return PagedBatch(model, num_requests=1, max_len=len(ids)).step({0: ids.tolist()})[0]


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    original = (tmp_path / "model.safetensors").read_bytes()
    down = "model__layers__1__mlp__down_proj__weight"
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({down: None}, r"1 tensor missing: model\.layers\.1\.mlp\.down_proj\.weight"),
        ({"model__extra": torch.zeros(1)}, r"1 tensor unexpected: model\.extra"),
        ({down: torch.zeros(48, 81)}, r"down_proj\.weight: expected shape \[48, 80\], found \[48, 81\]"),
        ({down: torch.zeros(48, 80, dtype=torch.int8)}, r"down_proj\.weight has type I8, expected"),
    ]
    for changes, message in cases:
        (tmp_path / "model.safetensors").write_bytes(original)
        edit_weights(tmp_path, **changes)
        with pytest.raises(ModelLoadError, match=message):
            load(tmp_path)


def test_transformers_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    save_tiny(tmp_path, "StableLm")
    edit_weights(tmp_path, model__norm__weight=None)
    with pytest.raises(ModelLoadError, match=r"1 missing tensors: model\.norm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("model_impl", ["pagewire", "transformers"])
@pytest.mark.parametrize("size", [0, 5, 300, -1000])
def test_truncated_file_is_named(tmp_path: Path, model_impl: str, size: int) -> None:
    save_tiny(tmp_path, "Llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        load(tmp_path, model_impl=model_impl)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act: 'relu' is not one of silu"),
        ({"num_hidden_layers": ...}, "num_hidden_layers: expected a positive integer up to 268435456, found None"),
        ({"num_attention_heads": "six"}, "num_attention_heads: expected a positive integer"),
        ({"num_key_value_heads": 4}, "num_attention_heads .* multiple of num_key_value_heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_parameters: rope_type 'ntk'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "strange": 1}}, r"rope_parameters\.strange"),
    ],
)
def test_config_values_we_do_not_implement_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_tiny(tmp_path, "Llama")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_quantized_checkpoints_are_refused_through_transformers(tmp_path: Path) -> None:
    save_tiny(tmp_path, "StableLm")
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelLoadError, match="quantization_config"):
        load(tmp_path)


def test_layer_types_we_do_not_implement_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Qwen3")
    edit_config(tmp_path, layer_types=["full_attention", "linear_attention", "full_attention"])
    with pytest.raises(ModelLoadError, match="layer_types: 'linear_attention'"):
        load(tmp_path, model_impl="pagewire")


def test_length_beyond_the_models_positions(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    with pytest.raises(ModelLoadError, match="--max-model-len 65 exceeds the model's 64 positions"):
        load(tmp_path, max_model_len=65)
    edit_config(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert load(tmp_path, max_model_len=128).config.max_position_embeddings == 64


def test_paths_that_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere: no such model"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor a single \.gguf"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read as JSON"):
        load(tmp_path)
    save_tiny(tmp_path, "Llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor .*Convert it once"):
        load(tmp_path)
    with pytest.raises(ModelLoadError, match="--load-format safetensors needs a directory"):
        (tmp_path / "x.gguf").touch()
        load(tmp_path / "x.gguf", load_format="safetensors")


def edit_scales(path: Path, **scales: torch.Tensor) -> None:
    """Adds scales of layer 1 to a checkpoint, by their names behind `self_attn.`."""
    edit_weights(path, **{f"model__layers__1__self_attn__{name}": value for name, value in scales.items()})


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([0.25])}, [[0.5, 0.5], [0.25, 0.25]]),
        ({"attn__k_scale": torch.tensor([0.5, 2.0]), "attn__v_scale": torch.tensor(1.5)}, [[0.5, 2.0], [1.5, 1.5]]),
        ({"k_proj__k_scale": torch.tensor(0.5).bfloat16(), "q_scale": torch.tensor(9.0)}, [[0.5, 0.5], [0.5, 0.5]]),
        ({}, [[1.0, 1.0], [1.0, 1.0]]),
    ],
)
@pytest.mark.parametrize("family", ["Llama", "StableLm"])
def test_scales_of_an_fp8_cache(
    tmp_path: Path, family: str, scales: dict[str, torch.Tensor], expected: list[list[float]]
) -> None:
    save_tiny(tmp_path, family)
    edit_scales(tmp_path, **scales)
    layers = load(tmp_path, kv_cache_dtype="fp8").attention_layers
    assert [layer.kv_scales.tolist() for layer in layers if layer.kv_scales is not None] == [
        [[1.0, 1.0], [1.0, 1.0]],
        expected,
        [[1.0, 1.0], [1.0, 1.0]],
    ]
    assert all(layer.kv_scales is None for layer in load(tmp_path).attention_layers), "only an fp8 cache is scaled"
    layers = load(tmp_path, kv_cache_dtype="smallest").attention_layers
    assert all(layer.kv_scales is not None for layer in layers)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.tensor([1.0, 1.0, 1.0])}, r"k_scale: expected one scale or one for each of 2 heads"),
        ({"v_scale": torch.tensor(0.0)}, r"v_scale: scales must be positive, found \[0\.0\]"),
    ],
)
def test_scales_that_cannot_be_used(tmp_path: Path, scales: dict[str, torch.Tensor], message: str) -> None:
    save_tiny(tmp_path, "Llama")
    edit_scales(tmp_path, **scales)
    with pytest.raises(ModelLoadError, match=f"{tmp_path}.*{message}"):
        load(tmp_path, kv_cache_dtype="fp8")
