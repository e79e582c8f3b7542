"""Experts in every quantized format: their logits are those of the dequantized model, or the format is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagewire.kernels.quantized import GroupedWeight, Int8Weight
from pagewire.kernels.quantized.packed import pack_grouped
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.experts.experts import ExpertsConfig, ExpertsLinear
from pagewire.services.executor.layers.experts.routing import Routing
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.loading.quantization.registry import quantization_of
from pagewire.services.executor.loading.weights_report import form
from tests.services.executor.loading.quantization import (
    test_awq,
    test_bitsandbytes,
    test_compressed_tensors,
    test_fp8,
    test_gptq,
)
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.models.experts.test_experts import EXPERTS, write_experts
from tests.services.executor.models.tiny import CPU, assert_same_logits, load, save_tiny

# What stores the weight of an expert's projection: (tensors by suffix, the weight that they stand for)
Packer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]

# Without the router: quantizers do not take it for a linear layer.
config_of = partial(test_compressed_tensors.config_of, ignore=["lm_head", "re:.*self_attn.*"])


def blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return test_fp8.pack("weight_scale_inv", test_fp8.BLOCK_SCALES, weight)


def fp8(weight: Tensor, *, static: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """A scale of the tensor; and, as calibration finds it, another scale of inputs for each expert."""
    tensors, exact = test_fp8.pack("weight_scale", weight.abs().amax() / 448, weight)
    return tensors | ({"input_scale": 1 / weight.abs().amax()} if static else {}), exact


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    exact = Int8Weight((weight / scales).round().to(torch.int8), scales.flatten())
    return {"weight": exact.weight, "weight_scale": scales}, exact.dequantize()


# What config.json says, what is stored, and how it is held on a CPU
FORMATS: dict[str, tuple[dict[str, Any], Packer, str]] = {
    "awq": (
        test_awq.CONFIG | {"group_size": 32},
        lambda weight: test_awq.pack_gemm(weight, 32),
        "4-bit, groups of 32",
    ),
    "gptq": (test_gptq.CONFIG, lambda weight: test_gptq.pack(weight, 4, 32), "4-bit, groups of 32"),
    "gptq of 8 bits": (
        test_gptq.CONFIG | {"bits": 8, "group_size": -1},
        lambda weight: test_gptq.pack(weight, 8, weight.shape[1]),
        "8-bit, a group per output",
    ),
    "fp8 blocks": (test_fp8.BLOCKS, blocks, "fp8, a group per output"),
    "fp8 with scales of inputs": (
        test_fp8.TENSOR | {"activation_scheme": "static"},
        partial(fp8, static=True),
        "fp8, a group per output",
    ),
    "compressed-tensors int4": (
        config_of(test_compressed_tensors.INT4, ignore=["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]),
        lambda weight: test_compressed_tensors.pack_int4(weight, 32),
        "4-bit, groups of 32",
    ),
    "compressed-tensors int8": (
        config_of(test_compressed_tensors.INT8, test_compressed_tensors.DYNAMIC_INT8, "int-quantized"),
        int8,
        "8-bit, a group per output",
    ),
    "compressed-tensors fp8": (
        config_of(
            test_compressed_tensors.FP8 | {"strategy": "tensor"},
            test_compressed_tensors.DYNAMIC_FP8,
            "float-quantized",
        ),
        fp8,
        "fp8, a group per output",
    ),
    "bitsandbytes nf4": (test_bitsandbytes.NF4, test_bitsandbytes.pack_nf4, "4-bit codebook, groups of 64"),
    "bitsandbytes int8": (test_bitsandbytes.INT8, test_bitsandbytes.pack_int8, "8-bit, a group per output"),
}
SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 2}


def save_quantized(path: Path, config: Mapping[str, Any], packer: Packer, **sizes: int) -> PreTrainedModel:
    """Saves a tiny Qwen3-MoE with quantized experts; returns it with the weights that were stored."""
    save_tiny(path, "Qwen3Moe", **(SIZES | sizes), num_hidden_layers=1, head_dim=16)
    tensors = load_file(path / "model.safetensors")
    dense, stored = dict(tensors), dict(tensors)
    for name in tensors:
        if ".experts." in name:
            parts, dense[name] = packer(stored.pop(name))
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": tensor.contiguous().clone() for suffix, tensor in parts.items()}
    save_file(dense, path / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    save_file(stored, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return expected


def experts_forms(model: Any) -> list[str]:
    return [form(part) for leaf in model.leaves() if isinstance(leaf, ExpertsLinear) for part in leaf.parts]


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_experts(tmp_path: Path, name: str) -> None:
    """Experts from the checkpoint, from the weights cache, dequantized, and random ones of the same form."""
    config, packer, held = FORMATS[name]
    expected = save_quantized(tmp_path, config, packer)
    model = load(tmp_path, weights_cache=str(tmp_path / "cache"))
    assert experts_forms(model) == [held, held]
    assert_same_logits(model, expected)
    assert_same_logits(load(tmp_path, weights_cache=str(tmp_path / "cache")), expected)
    assert_same_logits(load(tmp_path, quantization="none"), expected)
    assert experts_forms(load(tmp_path, load_format="dummy")) == [held, held]


@pytest.mark.parametrize("sizes", [(144, 80), (80, 272)], ids=str)
def test_experts_that_end_within_an_fp8_block(tmp_path: Path, sizes: tuple[int, int]) -> None:
    expected = save_quantized(
        tmp_path, test_fp8.BLOCKS, blocks, hidden_size=sizes[0], moe_intermediate_size=sizes[1], num_attention_heads=2
    )
    assert_same_logits(load(tmp_path), expected)


# Of gate and up projections, and of down projections
GGUF_TYPES = (
    (Type.Q4_0, Type.Q8_0),
    (Type.Q4_1, Type.Q5_1),
    (Type.Q2_K, Type.Q3_K),
    (Type.Q4_K, Type.Q6_K),
    (Type.IQ4_XS, Type.Q5_K),
)


@pytest.mark.parametrize("types", GGUF_TYPES, ids=lambda types: f"{types[0].name}, {types[1].name}")
def test_gguf(tmp_path: Path, types: tuple[Type, Type]) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "num_experts": 3}
    expected = tiny_model("Qwen3Moe", **(EXPERTS | sizes), head_dim=64, norm_topk_prob=True)
    types_of = {"ffn_gate": types[0], "ffn_up": types[0], "ffn_down": types[1]}
    write_experts(tmp_path / "tiny.gguf", expected, "qwen3moe", types_of)
    model = load(tmp_path / "tiny.gguf")
    assert "dense" not in experts_forms(model) and len(experts_forms(model)) == 2
    assert_same_logits(model, expected)


@pytest.mark.parametrize("num_orders", [1, 2], ids=["of all", "of their own"])
def test_act_order_is_refused(tmp_path: Path, num_orders: int) -> None:
    """Act-order is refused both with one order for all experts and with one for each, as calibration makes it."""
    generator = torch.Generator().manual_seed(0)
    orders = itertools.cycle([torch.randperm(128, generator=generator) for _ in range(num_orders)])
    expected = save_quantized(tmp_path, test_gptq.CONFIG, lambda weight: test_gptq.pack(weight, 4, 32, next(orders)))
    with pytest.raises(ModelLoadError, match=r"experts\.0\.\w+: .*act-order.*--quantization none"):
        load(tmp_path)
    assert_same_logits(load(tmp_path, quantization="none"), expected)


def test_experts_of_unequal_forms_are_refused(tmp_path: Path) -> None:
    config, packer, _ = FORMATS["gptq"]
    save_quantized(tmp_path, config, packer)
    tensors = load_file(tmp_path / "model.safetensors")
    module = "model.layers.0.mlp.experts.1.up_proj"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    tensors[f"{module}.weight"] = torch.zeros(128, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"experts\.0\.gate_proj: experts that differ.*--quantization none"):
        load(tmp_path)


def test_experts_that_do_not_fill_tiles_of_a_gpu_are_refused() -> None:
    config = ExpertsConfig(num_experts=2, hidden_size=64, intermediate_size=48, routing=Routing(top_k=1))
    placement = Placement(torch.float32, CPU, quantization_of(test_gptq.CONFIG, None), "mlp.")
    projection = ExpertsLinear(config, 64, {"gate_proj": 48, "up_proj": 48}, placement)
    weight_format = projection.shards[0].format
    assert weight_format is not None
    weight = weight_format.random(2 * 96, 64, torch.Generator())
    assert isinstance(weight, GroupedWeight)
    with pytest.raises(ModelLoadError, match=r"mlp\.experts\.0\.gate_proj: .* 96 outputs .* multiples of 64; add --qu"):
        projection.install([pack_grouped(weight, "cuda")])
