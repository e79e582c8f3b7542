"""GGUF models with weights left as the file has them: the logits of the same model dequantized."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from pagewire.kernels.quantized import PackedGrouped
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weights import Dense
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.decoder import DecoderModel
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.loading.quantization.gguf_tensors import HALVES, random_weight
from tests.services.executor.loading.weights.test_gguf import gguf_name, tiny_model, write_gguf
from tests.services.executor.models.test_models import CPU, assert_same_logits

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def load(path: Path, dtype: str = "float32", **options: Any) -> DecoderModel:
    model = load_model(path, dtype=dtype, device=CPU, **options)
    assert isinstance(model, DecoderModel)
    return model


def write_quantized(
    path: Path, model: PreTrainedModel, arch: str, types: Mapping[str, Type], std: float = 0.05
) -> dict[str, np.ndarray]:
    """Gives `model` random weights of these types (by GGUF name without `blk.0.` and `.weight`), and writes it.

    Returns the blocks by GGUF name.
    """
    rng = np.random.default_rng(0)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    blocks, names = {}, {}
    for name, parameter in model.named_parameters():
        full_name = gguf_name(name)
        short = full_name.removeprefix("blk.0.").removesuffix(".weight")
        if short not in types:
            continue
        type_ = types[short]
        rows, inputs = parameter.shape
        raw = random_weight(type_, rows, inputs, std, rng)
        values = torch.from_numpy(gguf.dequantize(raw, type_))
        if arch == "llama" and short in heads:  # the file has rows 2j + s of a head where the model has s * d/2 + j
            values = values.view(heads[short], -1, 2, inputs).transpose(1, 2).reshape(rows, inputs)
        parameter.data.copy_(values)
        blocks[full_name], names[full_name] = raw, type_
    assert len(blocks) == len(types)
    write_gguf(path, model, arch=arch, tensors=blocks, types=names)
    return blocks


@pytest.mark.parametrize("type_", HALVES, ids=lambda t: t.name)
def test_every_type(tmp_path: Path, type_: Type) -> None:
    expected = tiny_model("Llama", **SIZES, tie_word_embeddings=True)
    path = tmp_path / "tiny.gguf"
    write_quantized(path, expected, "llama", dict.fromkeys((*LINEAR, "token_embd"), type_))
    model = load(path)
    modules = list(model.quantized_modules())
    assert len(modules) == 5  # qkv, o, gate and up, down, the embedding, which is the head as well
    assert all(isinstance(part, PackedGrouped) for module in modules for part in module.parts)
    assert [len(module.parts) for module in modules] == [1] * 5
    assert_same_logits(model, expected)


MIXTURES = {
    "Q4_K_M": dict.fromkeys(LINEAR, Type.Q4_K)
    | {"attn_v": Type.Q6_K, "ffn_down": Type.Q6_K, "token_embd": Type.Q6_K, "output": Type.Q8_0},
    "every part another": {
        "attn_q": Type.Q2_K,
        "attn_k": Type.F16,
        "attn_v": Type.Q3_K,
        "attn_output": Type.BF16,
        "ffn_gate": Type.IQ4_XS,
        "ffn_up": Type.IQ4_NL,
        "ffn_down": Type.Q5_1,
        "output": Type.Q5_0,
    },
    "dense among quantized": {"attn_q": Type.F16, "attn_v": Type.Q4_0, "ffn_up": Type.Q4_1},
}


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures(tmp_path: Path, mixture: str, arch: str) -> None:
    expected = tiny_model({"llama": "Llama", "qwen2": "Qwen2"}[arch], **SIZES)
    path = tmp_path / "tiny.gguf"
    write_quantized(path, expected, arch, MIXTURES[mixture])
    assert_same_logits(load(path), expected)


def test_weights_take_the_memory_of_their_bits(tmp_path: Path) -> None:
    """A dense weight of the same file is read next to them; norms and biases stay in the model's dtype."""
    tiny = tiny_model("Llama", **SIZES)
    path = tmp_path / "tiny.gguf"
    write_quantized(path, tiny, "llama", dict.fromkeys(LINEAR, Type.Q4_0))
    model = load(path, dtype="bfloat16")
    linear = sum(p.numel() for name, p in tiny.named_parameters() if name.endswith("proj.weight"))
    dense = tiny.num_parameters() - linear
    assert 4.5 / 8 * linear + 2 * dense <= model.weight_bytes < 5.5 / 8 * linear + 2 * dense
    dense_parts = [part for module in model.quantized_modules() for part in module.parts if isinstance(part, Dense)]
    assert not dense_parts


@torch.inference_mode()
def test_native_bfloat16_is_close_to_fp32(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    expected = tiny_model("Llama", **SIZES, tie_word_embeddings=True)
    write_quantized(path, expected, "llama", dict.fromkeys((*LINEAR, "token_embd"), Type.Q4_K))
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    batch = PagedBatch(load(path, dtype="bfloat16"), num_requests=1, max_len=16)
    logits = batch.step({0: ids})[0]
    reference = expected(torch.tensor([ids])).logits[0]
    assert torch.nn.functional.cosine_similarity(logits.float(), reference, dim=-1).min() > 0.995


def test_types_without_kernels_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Small bytes have no scale that is infinite or NaN."""
    expected = tiny_model("Llama", **SIZES)
    shape = gguf.quant_shape_to_byte_shape((256, 512), Type.IQ2_S)
    raw = np.random.default_rng(0).integers(0, 40, shape, dtype=np.uint8)
    expected.model.layers[0].mlp.down_proj.weight.data.copy_(torch.from_numpy(gguf.dequantize(raw, Type.IQ2_S)))
    path = tmp_path / "tiny.gguf"
    name = "blk.0.ffn_down.weight"
    write_gguf(path, expected, arch="llama", tensors={name: raw}, types={name: Type.IQ2_S})
    with caplog.at_level(logging.WARNING):
        model = load(path)
    assert "tensors that are dequantized, as there is no kernel for them: 1 of type IQ2_S" in caplog.messages
    assert not list(model.quantized_modules())
    assert_same_logits(model, expected)


def test_a_damaged_scale_is_refused_by_tensor(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    blocks = write_quantized(path, tiny_model("Llama", **SIZES), "llama", dict.fromkeys(LINEAR, Type.Q6_K))
    data = path.read_bytes()
    stored = blocks["blk.0.attn_k.weight"].tobytes()
    at = data.index(stored) + 2 * 210 + 208  # the third block's scale of scales
    path.write_bytes(data[:at] + b"\x00\x7c" + data[at + 2 :])
    # of a head, the file's row 2j + s is the model's s * d/2 + j
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.k_proj\.weight: Q6_K row 1 has a scale"):
        load(path)


def test_dummy_weights_take_the_formats_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_quantized(path, tiny_model("Llama", **SIZES), "llama", MIXTURES["Q4_K_M"])
    dummy, real = load(path, load_format="dummy"), load(path)
    assert dummy.weight_bytes == real.weight_bytes
