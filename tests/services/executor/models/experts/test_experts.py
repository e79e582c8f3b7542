"""Models with a mixture of experts against transformers: dense, and from GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import PreTrainedModel

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.experts.experts import ExpertsLinear
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.weights.pack_dense import packs_dense
from pagewire.services.executor.models.decoder import DecoderModel
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.loading.quantization.gguf_tensors import random_weight
from tests.services.executor.loading.weights.test_gguf import tiny_model, write_gguf
from tests.services.executor.models.tiny import CPU, assert_same_logits, load, save_tiny

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SHARED: dict[str, Any] = EXPERTS | {"shared_expert_intermediate_size": 48}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "qwen2 moe": ("Qwen2Moe", SHARED | {"decoder_sparse_step": 2}),
    "qwen2 moe window": ("Qwen2Moe", SHARED | WINDOW | {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen3 moe": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}),
    "olmoe normalised": (
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "norm_topk_prob": True},
    ),
    "qwen3 moe window": ("Qwen3Moe", EXPERTS | WINDOW | {"head_dim": 8}),
}


@pytest.mark.architecture("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
@pytest.mark.parametrize("case", OWN)
def test_experts_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    family, overrides = OWN[case]
    expected = save_tiny(tmp_path, family, **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


@pytest.mark.parametrize("case", ["mixtral", "qwen2 moe"])
def test_all_experts_in_one_tensor(tmp_path: Path, case: str) -> None:
    """The form in which transformers has experts in memory."""
    family, overrides = OWN[case]
    expected = save_tiny(tmp_path, family, **overrides)
    expected.save_pretrained(tmp_path, save_original_format=False)
    assert any(tensor.dim() == 3 for tensor in load_file(tmp_path / "model.safetensors").values())
    assert_same_logits(load(tmp_path), expected)


def test_clipped_attention_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Olmoe", num_experts=4, intermediate_size=32, clip_qkv=8.0)
    with pytest.raises(ModelLoadError, match=r"clip_qkv: 8\.0 .*--model-impl transformers"):
        load(tmp_path)


GGUF: dict[str, tuple[str, str, dict[str, Any]]] = {
    "olmoe": ("olmoe", "Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4}),
    "qwen2 moe": ("qwen2moe", "Qwen2Moe", SHARED),
    "qwen3 moe": ("qwen3moe", "Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
}
ROUTERS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def write_experts(path: Path, model: PreTrainedModel, arch: str, types: Mapping[str, Type]) -> None:
    """Writes a GGUF file and sets the model's weights to its values. `types` are those of expert projections (ffn_gate,
    ffn_up, ffn_down); others are fp32."""
    config, rng = model.config, np.random.default_rng(0)
    tensors: dict[str, np.ndarray | None] = {}
    stored: dict[str, Type] = {}
    for i, layer in enumerate(model.model.layers):
        for name, parameter in layer.mlp.named_parameters(prefix="mlp"):
            module = name.removesuffix(".weight")
            tensors[f"blk.{i}.{name}"] = None
            if module in ROUTERS:
                tensors[f"blk.{i}.{ROUTERS[module]}.weight"] = parameter.detach().squeeze().numpy()
        experts = layer.mlp.experts
        gate, up = experts.gate_up_proj.data.chunk(2, dim=1)
        for projection, weight in (("ffn_gate", gate), ("ffn_up", up), ("ffn_down", experts.down_proj.data)):
            name = f"blk.{i}.{projection}_exps.weight"
            if (type_ := types.get(projection)) is None:
                tensors[name] = weight.numpy()
                continue
            blocks = random_weight(type_, weight.shape[0] * weight.shape[1], weight.shape[2], 0.1, rng)
            weight.copy_(torch.from_numpy(gguf.dequantize(blocks, type_)).view(weight.shape))
            tensors[name], stored[name] = blocks.reshape(*weight.shape[:2], -1), type_
    count = config.num_local_experts if arch in ("llama", "qwen3moe") else config.num_experts
    keys = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    if hasattr(config, "moe_intermediate_size"):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if hasattr(config, "shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    extra = {f"{arch}.{key}": value for key, value in keys.items()}
    write_gguf(path, model, arch=arch, extra=extra, tensors=tensors, types=stored)


@pytest.mark.parametrize("case", GGUF)
def test_gguf(tmp_path: Path, case: str) -> None:
    arch, family, overrides = GGUF[case]
    expected = tiny_model(family, **overrides)
    write_experts(tmp_path / "tiny.gguf", expected, arch, {})
    assert_same_logits(load(tmp_path / "tiny.gguf", model_impl="pagewire"), expected)


def test_bf16_is_packed_and_close_to_fp32(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Mixtral", num_local_experts=4, initializer_range=0.1)
    logits = []
    for dtype in ("float32", "bfloat16"):
        model = load_model(tmp_path, dtype=dtype, device=CPU)
        assert isinstance(model, DecoderModel)
        leaves = list(model.leaves())
        logits.append(PagedBatch(model, num_requests=1, max_len=24).step({0: list(range(20))})[0].float())
    form = "PackedDense" if packs_dense(torch.bfloat16, CPU) else "Dense"
    assert {type(leaf.weight).__name__ for leaf in leaves if isinstance(leaf, ExpertsLinear)} == {form}
    # A token that rounding sends to another expert has other logits.
    assert torch.nn.functional.cosine_similarity(logits[0], logits[1], dim=1).median() > 0.999
