"""GPT-OSS: sinks and windows, experts in bf16's form and in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pagewire.kernels.quantized import PackedGrouped
from pagewire.services.executor.models.experts.gpt_oss import GptOssModel
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny
from tests.services.executor.parallel.test_tensor_parallel import assert_equal_on_ranks

GPT_OSS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
}


@pytest.mark.architecture("GptOssForCausalLM")
@pytest.mark.parametrize("keys", [{}, {"swiglu_limit": 0.5, "attention_bias": False}], ids=["plain", "clamped"])
def test_dense(tmp_path: Path, keys: dict[str, Any]) -> None:
    expected = save_tiny(tmp_path, "GptOss", **(GPT_OSS | keys))
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path, "GptOss", **GPT_OSS)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(3)
    parameters = dict(expected.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, outputs, inputs // 32, 16), generator=generator).byte()
        scales = torch.randint(121, 127, (num_experts, outputs, inputs // 32), generator=generator).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameters[name].data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    model = load(tmp_path)
    assert isinstance(model, GptOssModel)
    assert sum(isinstance(part, PackedGrouped) for module in model.modules() for part in module.parts) == 6
    assert_same_logits(model, expected)
    assert_same_logits(load(tmp_path, quantization="none"), expected)
    assert_equal_on_ranks(tmp_path, 2, whole_experts=True)
    made_up = load(tmp_path, load_format="dummy", quantization="mxfp4")
    assert isinstance(made_up, GptOssModel) and made_up.weight_bytes == model.weight_bytes
