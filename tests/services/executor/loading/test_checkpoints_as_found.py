"""Checkpoints as people leave them: odd file names, names of tensors, keys of config.json, and what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.config_file import merged, overridden, parse_overrides, text_keys
from pagewire.services.executor.loading.weights.checkpoint_files import conversion_command
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.loading.test_loader import edit_config
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "weights.safetensors"])
def test_the_only_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    expected = save_tiny(tmp_path, "Llama")
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    (tmp_path / "consolidated.safetensors").touch()
    (tmp_path / "adapter_model.safetensors").touch()
    assert_same_logits(load(tmp_path), expected)


def test_shards_without_their_index(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path / "single", "Llama")
    expected.save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same_logits(load(tmp_path), expected)
    lost = sorted(tmp_path.glob("*.safetensors"))[-1]
    lost.unlink()
    with pytest.raises(ModelLoadError, match=f"shards are missing: {lost.name}; download"):
        load(tmp_path)


def test_an_index_that_puts_tensors_into_other_shards(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path / "single", "Llama")
    expected.save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names, files = list(content["weight_map"]), list(content["weight_map"].values())
    content["weight_map"] = dict(zip(names, reversed(files), strict=True)) | {"model.nothing": files[0]}
    index.write_text(json.dumps(content))
    assert_same_logits(load(tmp_path), expected)


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json", "model.gguf"])
def test_files_that_git_lfs_has_not_fetched(tmp_path: Path, name: str) -> None:
    save_tiny(tmp_path, "Llama")
    if name.endswith(".index.json"):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text(LFS_POINTER)
    with pytest.raises(ModelLoadError, match=rf"/{name}: .*; it is only the pointer.*: run `git lfs pull`"):
        load(tmp_path / name if name.endswith(".gguf") else tmp_path)


@pytest.mark.parametrize("content", ["{", '{"weight_map": {"a": "../model.safetensors"}}', '{"weight_map": [1]}'])
def test_an_index_that_is_damaged(tmp_path: Path, content: str) -> None:
    save_tiny(tmp_path, "Llama")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json: .*; download it again$"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["consolidated.safetensors"], "Mistral's own format"),
        (["adapter_model.safetensors"], "is an adapter: merge it"),
        (["a.safetensors", "b.safetensors"], r"which of a\.safetensors, b\.safetensors belong together"),
        (["consolidated.00.pth"], r"consolidated\.00\.pth is not supported: use the model in Hugging Face layout"),
        ([], "download the model's weights, or start with --load-format dummy"),
    ],
)
def test_files_that_are_not_read(tmp_path: Path, files: list[str], message: str) -> None:
    save_tiny(tmp_path, "Llama")
    (tmp_path / "model.safetensors").unlink()
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_pickled_weights_are_refused_with_a_command_that_converts_them(tmp_path: Path) -> None:
    """The head is the embedding, and so one memory for both names."""
    expected = save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    (tmp_path / "model.safetensors").unlink()
    tensors = expected.state_dict()
    names = sorted(tensors)
    for part in range(2):
        torch.save({name: tensors[name] for name in names[part::2]}, tmp_path / f"pytorch_model-{part}-of-2.bin")
    with pytest.raises(ModelLoadError) as refused:
        load(tmp_path)
    command = conversion_command(tmp_path)
    assert str(refused.value).endswith(command)
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    assert_same_logits(load(tmp_path), expected)


@pytest.mark.parametrize(("more", "less"), [("", "model."), ("module.", ""), ("base_model.model.", "")])
@pytest.mark.parametrize("tied", [False, True])
def test_names_with_another_prefix(tmp_path: Path, more: str, less: str, tied: bool) -> None:
    expected = save_tiny(tmp_path, "Llama", tie_word_embeddings=tied)
    file = tmp_path / "model.safetensors"
    save_file({more + name.removeprefix(less): tensor for name, tensor in load_file(file).items()}, file)
    assert_same_logits(load(tmp_path), expected)


@pytest.mark.parametrize(("name", "base"), [("GPT2", "transformer."), ("GPTNeoX", "gpt_neox.")])
@pytest.mark.parametrize("more", ["", "module."])
def test_names_of_families_with_prefixes_of_their_own(tmp_path: Path, name: str, base: str, more: str) -> None:
    """Saved from what is below the head, or wrapped."""
    expected = save_tiny(tmp_path, name, tie_word_embeddings=False)
    file = tmp_path / "model.safetensors"
    less = "" if more else base
    save_file({more + stored.removeprefix(less): tensor for stored, tensor in load_file(file).items()}, file)
    assert_same_logits(load(tmp_path), expected)


def test_a_head_of_another_dtype_although_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = save_tiny(tmp_path, "Llama", tie_word_embeddings=False)
    expected.lm_head.half()
    expected.save_pretrained(tmp_path)
    expected.lm_head.float()
    edit_config(tmp_path, tie_word_embeddings=True)
    assert_same_logits(load(tmp_path), expected)
    assert "has a head of its own" in caplog.text


def test_a_model_without_its_head(tmp_path: Path) -> None:
    """Saved through AutoModel: no prefix, and the head is missing unless it is the embedding."""
    expected = save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    expected.model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight; .* --hf-overrides '\{\"tie_word_embeddings\": true\}'"):
        load(tmp_path)
    assert_same_logits(load(tmp_path, hf_overrides={"tie_word_embeddings": True}), expected)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX", "Gemma2"])
def test_a_head_of_its_own_although_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    expected = save_tiny(tmp_path, name, tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    assert_same_logits(load(tmp_path), expected)
    assert "has a head of its own" in caplog.text


def test_a_head_that_differs_in_one_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = save_tiny(tmp_path, "Llama", tie_word_embeddings=False)
    with torch.no_grad():
        expected.lm_head.weight.copy_(expected.model.embed_tokens.weight)
        expected.lm_head.weight[41] += 1
    expected.save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    assert_same_logits(load(tmp_path), expected)
    assert "has a head of its own" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": ..., "torch_dtype": "torch.bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": "float32"},
        {"dtype": None, "torch_dtype": None},
        {"dtype": ...},
        {"dtype": "auto"},
    ],
)
def test_names_of_dtypes(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_tiny(tmp_path, "Llama")
    edit_config(tmp_path, **changes)
    assert load(tmp_path, dtype="auto").config.dtype == torch.bfloat16


@pytest.mark.parametrize("wrong", ["bf16", "nn", 16, {"text": "bfloat16"}])
def test_dtypes_that_do_not_exist(tmp_path: Path, wrong: Any) -> None:
    save_tiny(tmp_path, "Llama")
    edit_config(tmp_path, dtype=wrong)
    with pytest.raises(ModelLoadError, match=r"config\.json: key dtype: .* is not a torch dtype"):
        load(tmp_path)


@torch.inference_mode()
def test_a_checkpoint_in_float16_runs_on_a_cpu(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", initializer_range=0.1).half().save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager")
    assert_same_logits(load(tmp_path), expected)
    model = load(tmp_path, dtype="auto")
    assert model.config.dtype == torch.float16
    ids = torch.arange(20).tolist()
    logits = PagedBatch(model, num_requests=1, max_len=len(ids)).step({0: ids})[0]
    torch.testing.assert_close(logits.float(), expected(torch.tensor([ids])).logits[0], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ...},
        {"architectures": None},
        {"num_key_value_heads": None, "head_dim": None},
        {"num_key_value_heads": ..., "head_dim": ...},
        {"strange": {"key": [1]}, "rope_scaling": None, "eos_token_id": [2, 3]},
        {"initializer_range": float("nan"), "something": float("inf")},
        {"auto_map": {"AutoModelForCausalLM": "modeling.Llama"}},
    ],
)
def test_keys_that_are_missing_null_or_unknown(tmp_path: Path, changes: dict[str, Any]) -> None:
    expected = save_tiny(tmp_path, "Llama", num_key_value_heads=6)
    edit_config(tmp_path, **changes)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def test_the_language_model_of_several_parts(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path, "Llama")
    keys = json.loads((tmp_path / "config.json").read_text())
    text = {key: value for key, value in keys.items() if key != "architectures"}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "text_config": text | {"architectures": None}})
    )
    assert_same_logits(load(tmp_path), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive number, found nan"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a positive number, found '1e-6'"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id or a list of them"),
        (
            {"architectures": [], "model_type": "nobodys"},
            "no class is known for model_type 'nobodys'",
        ),
        ({"architectures": ["A", "B"]}, r"architectures must name one class, found \['A', 'B'\]"),
        (
            {"architectures": "LlamaForCausalLM"},
            r"one class, found 'LlamaForCausalLM'; name it: --hf-overrides",
        ),
        (
            {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            "does not implement model_type 'own'; the checkpoint brings code of its own, which Pagewire never runs",
        ),
    ],
)
def test_keys_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_tiny(tmp_path, "Llama")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=rf"{tmp_path}/config\.json: .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize("model_impl", ["pagewire", "transformers"])
def test_overrides(tmp_path: Path, model_impl: str) -> None:
    """The checkpoint's layers are kept, what the overrides say of its positions counts."""
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    expected = save_tiny(tmp_path, "Llama", rope_parameters=parameters)
    edit_config(tmp_path, rope_parameters=parameters | {"factor": 1.0}, max_position_embeddings=32)
    overrides = parse_overrides('{"rope_parameters": {"factor": 4.0}, "max_position_embeddings": 64}')
    model = load(tmp_path, model_impl=model_impl, hf_overrides=overrides)
    assert model.config.max_position_embeddings == 64
    assert_same_logits(model, expected)


def test_overrides_reach_the_language_model_of_a_composite() -> None:
    """Wherever they stand: text_config wins over what is beside it, and overrides win over both."""
    keys = {
        "architectures": ["A"],
        "model_type": "whole",
        "tie_word_embeddings": False,
        "text_config": {"hidden_size": 8, "rope_theta": 1.0, "tie_word_embeddings": False, "model_type": "part"},
    }
    beside = {"rope_theta": 2.0, "rope_scaling": {"factor": 2}, "hidden_size": 4, "tie_word_embeddings": True}
    for overrides in (beside, {"text_config": beside, "tie_word_embeddings": True}):
        found = overridden(keys, overrides)
        assert {key: text_keys(found)[key] for key in beside} == beside
        assert found["text_config"]["rope_theta"] == 2.0 and found["tie_word_embeddings"]
    found = overridden(keys, {"model_type": "other"})
    assert (found["model_type"], found["text_config"]["model_type"]) == ("other", "part")


def test_what_is_kept_of_weights_depends_on_the_overrides(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    options = {"weights_cache": str(tmp_path / "kept")}
    for overrides in ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {}, {}):
        model = load(tmp_path, hf_overrides=overrides, **options)
    assert_same_logits(model, expected)
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_overrides_are_merged_at_every_level() -> None:
    keys = {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    assert merged(keys, {"a": {"c": {"d": 3}}, "e": [4], "f": None}) == {
        "a": {"b": 1, "c": {"d": 3}},
        "e": [4],
        "f": None,
    }
    assert keys == {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    assert parse_overrides(None) == parse_overrides("") == {}


@pytest.mark.parametrize("text", ["{", "[1]", "tie=true"])
def test_overrides_must_be_a_json_object(text: str) -> None:
    with pytest.raises(ModelLoadError, match="--hf-overrides: "):
        parse_overrides(text)
