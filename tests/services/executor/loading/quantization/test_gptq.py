"""GPTQ checkpoints against decoders written element by element from the definition of AutoGPTQ and GPTQModel.

The reader was also compared once with auto-gptq 0.7.1 (`qlinear_cuda_old.QuantLinear`): of what its `pack` makes of 2,
4 and 8 bits, symmetric and not, groups of 32, 64, 128 and all inputs, it reads what its `forward` multiplies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import WeightFormat
from pagewire.services.executor.loading.quantization.gptq import GptqFormat
from pagewire.services.executor.loading.quantization.registry import quantization_of
from tests.services.executor.loading.quantization.checkpoints import (
    assert_fits,
    assert_loads_as,
    field,
    put,
    random_scales,
    random_words,
    save_quantized,
)
from tests.services.executor.loading.test_loader import edit_config, edit_weights
from tests.services.executor.models.test_models import load
from tests.sweep import examples

CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
MODULE = "model.layers.0.mlp.up_proj"


def format_of(**changes: Any) -> WeightFormat:
    found = quantization_of(CONFIG | changes, None).format(MODULE)
    assert found is not None
    return found


def decode(tensors: dict[str, Tensor], bits: int, group_size: int, first_zero: int) -> Tensor:
    """Decodes element by element; `first_zero` is the zero point that a stored 0 means."""
    words, zeros, scales = tensors["qweight"].tolist(), tensors["qzeros"].tolist(), tensors["scales"].float()
    per_word, num_outputs = 32 // bits, len(words[0])
    num_inputs = len(words) * per_word
    groups = tensors["g_idx"].tolist() if "g_idx" in tensors else [k // group_size for k in range(num_inputs)]
    weight = []
    for n in range(num_outputs):
        row = []
        for k, group in enumerate(groups):
            code = field(words[k // per_word][n], k % per_word, bits)
            zero = field(zeros[group][n // per_word], n % per_word, bits) + first_zero
            row.append(code - zero)
        weight.append(row)
    return scales.t()[:, groups] * torch.tensor(weight)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """codes [R, C], several rows in a word -> int32 [R / codes per word, C]"""
    per_word = 32 // bits
    columns = [
        [put(column[start : start + per_word], bits) for start in range(0, len(column), per_word)]
        for column in codes.t().tolist()
    ]
    return torch.tensor(columns, dtype=torch.int32).t()


def random_tensors(
    num_outputs: int, num_inputs: int, bits: int, groups: int, seed: int, zeros: Tensor | None = None
) -> dict[str, Tensor]:
    """zeros [G, N]: as they are stored; otherwise such as any format can hold."""
    if zeros is None:
        generator = torch.Generator().manual_seed(seed)
        zeros = torch.randint(2**bits - 1, (groups, num_outputs), generator=generator)
    return {
        "qweight": random_words((num_inputs * bits // 32, num_outputs), seed),
        "qzeros": pack_rows(zeros.t(), bits).t().contiguous(),
        "scales": random_scales((groups, num_outputs), seed),
    }


@settings(max_examples=examples(30), deadline=None)
@given(
    bits=st.sampled_from([2, 4, 8]),
    output_words=st.integers(1, 3),
    input_words=st.integers(1, 10),
    group_size=st.sampled_from([-1, 8, 16, 32, 64]),
    is_v2=st.booleans(),
    order=st.sampled_from(["none", "stored", "act"]),
    seed=st.integers(0, 1000),
)
def test_random_words(
    bits: int, output_words: int, input_words: int, group_size: int, is_v2: bool, order: str, seed: int
) -> None:
    num_outputs, num_inputs = output_words * 32 // bits, input_words * 32 // bits
    size = num_inputs if group_size == -1 else group_size
    groups = -(-num_inputs // size)
    tensors = random_tensors(num_outputs, num_inputs, bits, groups, seed)
    if order != "none":
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.arange(num_inputs) if order == "stored" else torch.randperm(num_inputs, generator=generator)
        tensors["g_idx"] = (inputs // size).int()
    # The config's desc_act says nothing about g_idx: checkpoints exist that have one without the other.
    checkpoint_format = "gptq_v2" if is_v2 else "gptq"
    weight_format = format_of(bits=bits, group_size=group_size, sym=False, checkpoint_format=checkpoint_format)
    assert_fits(weight_format, tensors, num_outputs, num_inputs)
    weight = weight_format.read(tensors, num_outputs, num_inputs)
    assert torch.equal(weight.dequantize(), decode(tensors, bits, size, 0 if is_v2 else 1))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_zero_point_of_0_in_v1(bits: int) -> None:
    """GPTQModel makes v1 of v2 by subtracting a word of ones: 0 becomes the highest code and borrows from the next."""
    per_word = 32 // bits
    zeros = torch.randint(2**bits, (3, 2 * per_word), generator=torch.Generator().manual_seed(0))
    zeros[0, :3] = torch.tensor([0, 0, 2])
    v2 = random_tensors(2 * per_word, 96, bits, 3, 0, zeros)
    ones = torch.tensor([[put([1] * per_word, bits)]], dtype=torch.int32)
    v1 = v2 | {"qzeros": v2["qzeros"] - ones}
    weights = [
        format_of(bits=bits, sym=False, checkpoint_format=name).read(tensors, 2 * per_word, 96).dequantize()
        for name, tensors in (("gptq_v2", v2), ("gptq", v1))
    ]
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_symmetric_weights_have_one_zero_point(bits: int) -> None:
    middle = 2 ** (bits - 1)
    for name, stored in (("gptq", middle - 1), ("gptq_v2", middle)):
        tensors = random_tensors(16, 64, bits, 2, 0, torch.full((2, 16), stored))
        weight = format_of(bits=bits, checkpoint_format=name).read(tensors, 16, 64)
        assert torch.equal(weight.dequantize(), decode(tensors, bits, 32, middle - stored))
        other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[name]
        with pytest.raises(ModelLoadError, match=f"qzeros: .* all be {middle}, .* set checkpoint_format to '{name}'"):
            format_of(bits=bits, checkpoint_format=other).read(tensors, 16, 64)
    tensors["qzeros"] = random_words((2, 16 * bits // 32), 0)
    with pytest.raises(ModelLoadError, match=r"qzeros: .* damaged, or sym is wrong"):
        format_of(bits=bits).read(tensors, 16, 64)


def pack(weight: Tensor, bits: int, group_size: int, order: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Symmetric, v1. order: inputs by group, as act-order has it."""
    num_outputs, num_inputs = weight.shape
    size = num_inputs if group_size == -1 else group_size
    order = torch.arange(num_inputs) if order is None else order
    g_idx = torch.empty(num_inputs, dtype=torch.int32)
    g_idx[order] = (torch.arange(num_inputs) // size).int()
    middle, groups = 2 ** (bits - 1), -(-num_inputs // size)
    scales = torch.stack([weight[:, g_idx == group].abs().amax(1) / (middle - 1) for group in range(groups)]).half()
    codes = (weight.t() / scales[g_idx]).round().add(middle).clamp(0, 2**bits - 1).long()
    tensors = random_tensors(num_outputs, num_inputs, bits, groups, 0, torch.full((groups, num_outputs), middle - 1))
    tensors |= {"qweight": pack_rows(codes, bits), "scales": scales, "g_idx": g_idx}
    return tensors, decode(tensors, bits, size, 1)


def test_model(tmp_path: Path) -> None:
    """A model with act-order in one layer, 8 bits and a single group in another, a dense module, and biases of
    zeros."""

    def packer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if name.endswith("layers.1.self_attn.o_proj"):
            return None
        order = (
            torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3)) if "layers.2" in name else None
        )
        tensors, dequantized = pack(weight, *((8, -1) if "layers.1" in name else (4, 32)), order)
        return tensors | {"bias": torch.zeros(len(weight)).half()}, dequantized

    rules = {r"-:model\.layers\.1\.self_attn\.o_proj": {}, r"+:.*layers\.1\.": {"bits": 8, "group_size": -1}}
    expected = save_quantized(tmp_path, CONFIG | {"dynamic": rules}, packer)
    assert_loads_as(tmp_path, expected)
    edit_weights(tmp_path, model__layers__0__mlp__up_proj__bias=torch.ones(160).half())
    with pytest.raises(ModelLoadError, match=r"up_proj\.bias: is not zero, but config\.json describes a layer without"):
        load(tmp_path)


def test_layers_that_have_biases(tmp_path: Path) -> None:
    expected = save_quantized(
        tmp_path, CONFIG, lambda _, weight: pack(weight, 4, 32), attention_bias=True, num_hidden_layers=1
    )
    assert_loads_as(tmp_path, expected)


def test_config_beside_config_json(tmp_path: Path) -> None:
    """AutoGPTQ once wrote `quantize_config.json`, without quant_method."""
    expected = save_quantized(tmp_path, CONFIG, lambda _, weight: pack(weight, 4, 32), num_hidden_layers=1)
    edit_config(tmp_path, quantization_config=...)
    file = tmp_path / "quantize_config.json"
    file.write_text('{"bits": 4, "group_size": 32, "desc_act": false, "sym": true}')
    assert_loads_as(tmp_path, expected)
    file.write_text('{"bits": 4, "group_size": 12}')
    with pytest.raises(ModelLoadError, match=r"quantize_config\.json: .*group_size: 12 is not supported"):
        load(tmp_path)


def test_rules_of_dynamic() -> None:
    rules = {
        r"-:.*\.mlp\.": {},
        r".*\.v_proj": {"bits": 8, "sym": False},
        r"+:.*\.layers\.1\..*": {"group_size": 64, "desc_act": True, "damp_percent": 0.1},
    }
    found = quantization_of(CONFIG | {"dynamic": rules}, None)
    base = GptqFormat(4, 32, symmetric=True, act_order=False, is_v2=False)
    assert found.format("model.layers.0.self_attn.q_proj") == base
    assert found.format("model.layers.1.mlp.up_proj") is None
    assert found.format("model.layers.1.self_attn.v_proj") == GptqFormat(8, 32, False, False, False)
    assert found.format("model.layers.1.self_attn.k_proj") == GptqFormat(4, 64, True, True, False)


def test_modules_that_stay_dense() -> None:
    assert quantization_of(CONFIG | {"modules_to_not_convert": ["up_proj"]}, None).format(MODULE) is None
    assert quantization_of(CONFIG, {f"{MODULE}.weight"}).format(MODULE) is None
    assert quantization_of(CONFIG, {f"{MODULE}.qweight"}).format(MODULE) is not None
    for lm_head in (True, False):
        found = quantization_of(CONFIG | {"lm_head": lm_head}, None)
        assert (found.format("lm_head") is not None) == lm_head
        assert found.format("model.embed_tokens") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, r"quantization_config\.bits: 3 is not supported, expected 2 or 4 or 8"),
        ({"group_size": 12}, r"group_size: 12 is not supported"),
        ({"sym": "true"}, r"sym: 'true' is not supported, expected True or False"),
        (
            {"checkpoint_format": "marlin"},
            r"checkpoint_format: 'marlin' is not supported, expected 'gptq' or 'gptq_v2'",
        ),
        ({"is_marlin_format": True}, r"is_marlin_format: GPTQ in Marlin's layout is not supported"),
        ({"pack_dtype": "int64"}, r"pack_dtype: 'int64' is not supported"),
        ({"dynamic": ["up_proj"]}, r"dynamic: expected an object, found \['up_proj'\]"),
        ({"dynamic": {"-:(": {}}}, r"dynamic: rule '-:\(' is not a regular expression"),
        ({"dynamic": {"up": {"bits": 5}}}, r"dynamic: rule 'up': .*bits: 5 is not supported"),
        ({"dynamic": {"up": {"checkpoint_format": "gptq_v2"}}}, r"rule 'up': checkpoint_format cannot differ"),
        ({"dynamic": {"up": 8}}, r"rule 'up': expected an object, found 8"),
    ],
)
def test_config_that_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        quantization_of(CONFIG | changes, None)


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        ([0] * 32 + [2] * 32, "g_idx: names groups 0 to 2, but scales has 2"),
        ([-1] * 32 + [1] * 32, "g_idx: names groups -1 to 1"),
        ([0] * 40 + [1] * 24, "g_idx: group 0 has 40 inputs, expected 32; groups of different sizes are not supported"),
        ([0] * 64, "g_idx: group 0 has 64 inputs, expected 32"),
        ([1] * 64, "g_idx: group 0 has 0 inputs, expected 32"),
    ],
)
def test_groups_that_are_refused(g_idx: list[int], message: str) -> None:
    tensors = random_tensors(16, 64, 4, 2, 0) | {"g_idx": torch.tensor(g_idx)}
    with pytest.raises(ModelLoadError, match=message):
        format_of(sym=False).read(tensors, 16, 64)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((16, 60), "the number of inputs is 60"), ((20, 64), "the number of outputs is 20, but .* 8 of them in a word")],
)
def test_shapes_that_are_refused(shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        format_of().tensors(*shape)


@pytest.mark.parametrize("changes", [{}, {"bits": 8, "sym": False}, {"desc_act": True, "group_size": -1}])
def test_random_weights(changes: dict[str, Any]) -> None:
    weights = [format_of(**changes).random(256, 320, torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    assert weights[0].dequantize().std() == pytest.approx(0.02, rel=0.1)
    assert weights[0].stacks_with(weights[1]), "projections of one input are one product"
