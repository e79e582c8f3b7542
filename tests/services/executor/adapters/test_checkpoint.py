"""Files of adapters, as PEFT and llama.cpp's converter write them, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from pagewire.services.executor.adapters.checkpoint import AdapterError, read_adapter
from tests.sweep import examples

ATTENTION = "base_model.model.model.layers.0.self_attn."
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def weights(rank: int = 4, outputs: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rank, 6), torch.randn(outputs, rank)


def named(prefix: str, pair: tuple[Tensor, Tensor], infix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}.lora_A{infix}.weight": pair[0], f"{prefix}.lora_B{infix}.weight": pair[1]}


def save(folder: Path, tensors: Mapping[str, Tensor] | None = None, **keys: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "base_model_name_or_path": "the/base"}
    (folder / "adapter_config.json").write_text(json.dumps(config | keys))
    tensors = named(f"{ATTENTION}q_proj", weights()) if tensors is None else tensors
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def test_a_folder_of_peft(tmp_path: Path) -> None:
    q, k = weights(), weights(2)
    path = save(
        tmp_path / "a",
        named(f"{ATTENTION}q_proj", q) | named(f"{ATTENTION}k_proj", k, ".default"),
        rank_pattern={r"layers\.\d+\.self_attn\.k_proj": 2},
        alpha_pattern={"k_proj": 6},
    )
    adapter = read_adapter(path)
    assert (adapter.base_model, set(adapter.modules)) == ("the/base", {Q, K})
    assert (adapter.modules[Q].scale, adapter.modules[K].scale) == (2.0, 3.0)
    for module, (down, up) in ((Q, q), (K, k)):
        assert torch.equal(adapter.modules[module].down, down) and torch.equal(adapter.modules[module].up, up)
    assert read_adapter(save(tmp_path / "root", use_rslora=True)).modules[Q].scale == 4.0
    assert all(len(read_adapter(one).digest) == 64 for one in (path, tmp_path / "root"))


def test_a_pattern_counts_from_a_dot_to_the_end(tmp_path: Path) -> None:
    """Takes the first that matches, as PEFT does; "proj" is not "q_proj"."""
    path = save(
        tmp_path / "a", alpha_pattern={"proj": 1, "self_attn": 2, "model.layers.0.self_attn.q_proj": 12, ".*": 5}
    )
    assert read_adapter(path).modules[Q].scale == 3.0


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    tensors = named(f"{ATTENTION}q_proj", weights())
    first, same = read_adapter(save(tmp_path / "a", tensors)), read_adapter(save(tmp_path / "b", tensors))
    other = read_adapter(save(tmp_path / "c", tensors, lora_alpha=9))
    assert first.digest == same.digest != other.digest
    held = first.modules[Q].down.clone()
    save(tmp_path / "a", {name: tensor + 1 for name, tensor in tensors.items()})
    assert torch.equal(first.modules[Q].down, held), "what was read does not change with its file"
    assert read_adapter(tmp_path / "a").digest != first.digest


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"use_dora": True}, "use_dora is set: it is a DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"bias": "all"}, "bias is 'all', expected 'none'"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"target_parameters": [5]}, r"target_parameters: expected a list of names, found \[5\]"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "save it with path_initial_model_for_weight_conversion"),
        ({"r": 0}, "r: expected a positive whole number, found 0"),
        ({"r": True}, "r: expected a positive whole number, found True"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a number, found '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a number, found nan"),
        ({"rank_pattern": [1]}, r"rank_pattern: expected an object, found \[1\]"),
        ({"rank_pattern": {"(": 1}}, r"rank_pattern has '\('; what is read are names with a few"),
        ({"rank_pattern": {"(a+)+": 1}}, r"rank_pattern has '\(a\+\)\+'; what is read"),
        ({"rank_pattern": {"a?" * 30 + "a" * 30: 1}}, "what is read are names"),
        ({"alpha_pattern": {"(a|a)" * 30: 1}}, "what is read are names"),
        ({"rank_pattern": {f"a{i}": 1 for i in range(1001)}}, "rank_pattern has 1001 keys, of at most 1000"),
        ({"zz": "x" * (1 << 20)}, "more than the 1048576 of any adapter"),
        ({"use_rslora": "yes"}, "use_rslora: expected true or false, found 'yes'"),
        ({"rank_pattern": {"q_proj": 3}}, r"q_proj has rank 4, adapter_config.json says 3"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        read_adapter(save(tmp_path / "a", **keys))


A, B = weights()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "it has no tensors"),
        ({f"{ATTENTION}q_proj.lora_A.weight": A}, "q_proj has no lora_B"),
        (named(f"{ATTENTION}q_proj", (A, B.T.contiguous())), "expected .rank, inputs. and .outputs, rank."),
        (named(f"{ATTENTION}q_proj", (A.double(), B.double())), "expected float32, bfloat16 or float16"),
        (named(f"{ATTENTION}q_proj", (A * float("inf"), B)), "has values that are not finite"),
        (named("base_model.model.lm_head", (A, B)), "lm_head is the output head, to which adapters are not applied"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": A}, "changes the embedding"),
        ({f"{ATTENTION}q_proj.lora_magnitude_vector": A}, "is of a DoRA"),
        ({f"{ATTENTION}q_proj.lora_B.bias": A}, "is a bias"),
        ({f"{ATTENTION}q_norm.weight": A}, "is no lora_A or lora_B"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        read_adapter(save(tmp_path / "a", tensors))


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    path = save(tmp_path / "a")
    weights_file, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    whole = weights_file.read_bytes()
    for damaged in (b"", whole[:-1], b"\xff" * 100):
        weights_file.write_bytes(damaged)
        with pytest.raises(AdapterError, match=r"truncated or not a safetensors file .*; download it again"):
            read_adapter(path)
    weights_file.rename(path / "adapter_model.bin")
    with pytest.raises(
        AdapterError, match=r"adapter_model.bin, which may hold code, is not read; convert it once: python"
    ):
        read_adapter(path)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors is missing"):
        read_adapter(path)
    for text in ("{", "[" * 100_000, "[]"):
        config.write_text(text)
        with pytest.raises(AdapterError, match=r"adapter_config.json: .*; download it again"):
            read_adapter(path)
    with weights_file.open("wb") as file:
        os.truncate(file.fileno(), 17 << 30)  # takes no space
    save_config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    config.write_text(json.dumps(save_config))
    with pytest.raises(AdapterError, match="more than the"):
        read_adapter(path)
    with pytest.raises(AdapterError, match=r"neither a folder with adapter_config.json nor a .gguf file"):
        read_adapter(tmp_path / "none")


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([1]) | st.just({"a": 1})
KEYS = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "modules_to_save")


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_value_of_a_key_is_read_or_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    path = save(tmp_path / "a", **keys)
    try:
        assert read_adapter(path).modules[Q].rank == 4
    except AdapterError as error:
        assert str(path) in str(error)


def write_gguf(path: Path, tensors: Mapping[str, np.ndarray], architecture: str = "qwen2", **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {"type": "adapter", "kind": "lora", "alpha": 8.0} | keys
    for key, value in values.items():
        if key == "alpha":
            writer.add_float32("adapter.lora.alpha", value)
        else:
            writer.add_string({"type": "general.type", "kind": "adapter.type"}.get(key, key), value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_named(name: str, pair: tuple[Tensor, Tensor]) -> dict[str, np.ndarray]:
    return {f"{name}.weight.lora_{side}": tensor.numpy() for side, tensor in zip("ab", pair, strict=True)}


def test_a_gguf_file(tmp_path: Path) -> None:
    q, down = weights(), weights(2)
    tensors = gguf_named("blk.0.attn_q", q) | gguf_named("blk.11.ffn_down", (down[0].half(), down[1].half()))
    adapter = read_adapter(write_gguf(tmp_path / "a.gguf", tensors))
    assert set(adapter.modules) == {Q, "model.layers.11.mlp.down_proj"}
    module = adapter.modules[Q]
    assert torch.equal(module.down, q[0]) and torch.equal(module.up, q[1]) and module.scale == 2.0
    assert adapter.modules["model.layers.11.mlp.down_proj"].down.dtype is torch.float16
    assert read_adapter(write_gguf(tmp_path / "b.gguf", tensors)).digest == adapter.digest
    unscaled = read_adapter(write_gguf(tmp_path / "c.gguf", tensors, alpha=0.0))
    assert unscaled.modules[Q].scale == 1.0 and unscaled.digest != adapter.digest


def test_experts_of_a_gguf_file(tmp_path: Path) -> None:
    down, up = torch.randn(3, 2, 8), torch.randn(3, 6, 2)
    path = write_gguf(tmp_path / "a.gguf", gguf_named("blk.1.ffn_up_exps", (down, up)), "qwen3moe")
    modules = read_adapter(path).modules
    assert list(modules) == [f"model.layers.1.mlp.experts.{expert}.up_proj" for expert in range(3)]
    for expert, module in enumerate(modules.values()):
        assert torch.equal(module.down, down[expert]) and torch.equal(module.up, up[expert]) and module.scale == 4.0
    flat = write_gguf(tmp_path / "b.gguf", gguf_named("blk.1.ffn_up_exps", (down[0], up[0])), "qwen3moe")
    with pytest.raises(AdapterError, match=r"expected \[experts, rank, inputs\] and \[experts, outputs, rank\]"):
        read_adapter(flat)


def permuted(up: Tensor, num_heads: int) -> Tensor:
    """Orders rows of queries or keys as llama.cpp's converter does with Llama's (`LlamaModel.permute`)."""
    return up.view(num_heads, 2, up.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(up.shape)


def test_queries_and_keys_of_llama_are_put_in_order(tmp_path: Path) -> None:
    q, k = weights(outputs=32), weights(outputs=16)
    tensors = gguf_named("blk.0.attn_q", (q[0], permuted(q[1], 4))) | gguf_named(
        "blk.0.attn_k", (k[0], permuted(k[1], 2))
    )
    path = write_gguf(tmp_path / "a.gguf", tensors, "llama")
    modules = read_adapter(path, (4, 2)).modules
    assert torch.equal(modules[Q].up, q[1]) and torch.equal(modules[K].up, k[1])
    for heads in (None, (5, 3)):
        with pytest.raises(AdapterError, match="which are not those of the model's heads; serve the folder"):
            read_adapter(path, heads)


@pytest.mark.parametrize(
    ("tensors", "keys", "message"),
    [
        (gguf_named("blk.0.attn_q", (A, B)), {"type": "model"}, "general.type is 'model'"),
        (gguf_named("blk.0.attn_q", (A, B)), {"kind": "control_vector"}, "adapter.type 'control_vector'"),
        (gguf_named("output", (A, B)), {}, "is not of a linear layer with a name in the checkpoint"),
        (gguf_named("blk.0.ffn_gate_exps", (A, B)), {}, "is not of a linear layer with a name in the checkpoint"),
        ({"blk.0.attn_q.weight.lora_a": A.numpy()}, {}, "q_proj has no lora_b"),
    ],
)
def test_gguf_files_that_are_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        read_adapter(write_gguf(tmp_path / "a.gguf", tensors, **keys))


def test_a_damaged_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", gguf_named("blk.0.attn_q", weights()))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(AdapterError, match="truncated or not a GGUF file"):
        read_adapter(path)
