"""FP8 checkpoints against scales applied element by element, and against transformers, which can dequantize them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from pagewire.kernels.quantized import Fp8Weight
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import WeightFormat
from pagewire.services.executor.loading.quantization.eight_bit import Fp8Format
from pagewire.services.executor.loading.quantization.registry import quantization_of
from tests.services.executor.loading.quantization.checkpoints import (
    assert_fits,
    assert_loads_as,
    random_scales,
    random_words,
    save_quantized,
)
from tests.services.executor.loading.test_loader import edit_weights
from tests.services.executor.models.test_models import load
from tests.sweep import examples

MODULE = "model.layers.0.mlp.up_proj"
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
TENSOR: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def format_of(config: dict[str, Any], *suffixes: str) -> WeightFormat:
    names = {f"{MODULE}.{suffix}" for suffix in ("weight", *suffixes)} if suffixes else None
    found = quantization_of(config, names).format(MODULE)
    assert found is not None
    return found


def random_fp8(shape: tuple[int, int], seed: int) -> Tensor:
    """All values but the two that are not numbers."""
    codes = random_words(shape, seed, torch.uint8)
    return codes.masked_fill_(codes.bitwise_and(0x7F) == 0x7F, 0).view(torch.float8_e4m3fn)


@settings(max_examples=examples(15), deadline=None)
@given(num_outputs=st.integers(1, 300), num_inputs=st.integers(1, 300), seed=st.integers(0, 1000))
def test_blocks(num_outputs: int, num_inputs: int, seed: int) -> None:
    weight = random_fp8((num_outputs, num_inputs), seed)
    scales = random_scales((-(-num_outputs // 128), -(-num_inputs // 128)), seed, torch.bfloat16)
    tensors = {"weight": weight, "weight_scale_inv": scales}
    weight_format = format_of(BLOCKS)
    assert_fits(weight_format, tensors, num_outputs, num_inputs)
    dequantized = weight_format.read(tensors, num_outputs, num_inputs).dequantize()
    for n in range(0, num_outputs, 7):
        for k in range(0, num_inputs, 5):
            assert dequantized[n, k] == weight[n, k].float() * scales[n // 128, k // 128].float()


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
@pytest.mark.parametrize("shape", [(), (1,), (12,), (12, 1)])
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_tensors_and_channels(method: str, shape: tuple[int, ...], suffix: str) -> None:
    tensors = {"weight": random_fp8((12, 20), 0), suffix: random_scales(shape, 1, torch.float32)}
    weight_format = format_of({"quant_method": method}, suffix)
    assert_fits(weight_format, tensors, 12, 20)
    expected = tensors["weight"].float() * tensors[suffix].reshape(-1, 1)
    assert torch.equal(weight_format.read(tensors, 12, 20).dequantize(), expected)


@pytest.mark.parametrize("suffix", ["input_scale", "activation_scale"])
def test_scales_of_inputs(suffix: str) -> None:
    tensors = {"weight": random_fp8((12, 20), 0), "weight_scale": torch.tensor(0.5), suffix: torch.tensor(0.25)}
    weight_format = format_of(TENSOR | {"activation_scheme": "static"}, "weight_scale", suffix)
    assert_fits(weight_format, tensors, 12, 20)
    weight = weight_format.read(tensors, 12, 20)
    assert isinstance(weight, Fp8Weight)
    assert weight.input_scale is not None
    assert weight.input_scale.tolist() == [0.25]


def pack(suffix: str, scales: Tensor, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    spread = scales
    if scales.dim() == 2:
        scales = scales[: -(-len(weight) // 128), : -(-weight.shape[1] // 128)]
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": values, suffix: scales}, values.float() * spread


BLOCK_SCALES = torch.tensor([[0.25, 0.5, 2.0], [2.0, 4.0, 0.5], [0.5, 0.25, 1.0]])


def test_model_of_blocks(tmp_path: Path) -> None:
    """Blocks that are not whole, and dense modules."""

    def packer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return None if "layers.1.mlp" in name else pack("weight_scale_inv", BLOCK_SCALES, weight)

    config = BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}
    assert_loads_as(tmp_path, save_quantized(tmp_path, config, packer, hidden_size=144, intermediate_size=272))


def test_model_that_transformers_dequantizes(tmp_path: Path) -> None:
    """The form that transformers dequantizes where a device does not multiply fp8: whole blocks only."""
    sizes: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 256, "num_hidden_layers": 1}
    config = BLOCKS | {"modules_to_not_convert": ["lm_head"]}
    save_quantized(tmp_path, config, lambda _, weight: pack("weight_scale_inv", BLOCK_SCALES, weight), **sizes)
    dequantize = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=["lm_head"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=dequantize, dtype=torch.float32)
    assert_loads_as(tmp_path, theirs.eval())


def test_model_whose_fused_projections_have_scales_of_their_own(tmp_path: Path) -> None:
    def packer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return pack("weight_scale", torch.tensor(0.01 * sum(name.encode()) / 1000), weight)

    assert_loads_as(tmp_path, save_quantized(tmp_path, TENSOR, packer))


def test_modules_that_stay_dense() -> None:
    for key in ("modules_to_not_convert", "ignored_layers"):
        found = quantization_of(BLOCKS | {key: ["model.layers.0.mlp"]}, None)
        assert found.format(MODULE) is None
        assert found.format("model.layers.1.mlp.up_proj") == Fp8Format(blocks=True, scale="weight_scale_inv")
        assert found.format("lm_head") is None
    found = quantization_of(BLOCKS, {f"{MODULE}.weight", "model.layers.1.mlp.up_proj.weight_scale_inv"})
    assert found.format(MODULE) is None
    assert found.format("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 128]}, r"weight_block_size: \[64, 128\] is not supported, expected \[128, 128\]"),
        ({"weight_block_size": 128}, r"weight_block_size: 128 is not supported"),
        ({"fmt": "e5m2"}, r"fmt: 'e5m2' is not supported"),
        ({"activation_scheme": "none"}, r"activation_scheme: 'none' is not supported, expected 'dynamic' or 'static'"),
    ],
)
def test_config_that_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        quantization_of(BLOCKS | changes, None)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    config = TENSOR | {"activation_scheme": "static"}

    def packer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, dequantized = pack("weight_scale", torch.tensor(0.5), weight)
        return tensors | {"input_scale": torch.tensor(1.0)}, dequantized

    save_quantized(tmp_path, config, packer, num_hidden_layers=1)
    original = (tmp_path / "model.safetensors").read_bytes()
    damaged = torch.full((96, 160), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn)
    cases: list[tuple[str, Tensor | None, str]] = [
        (
            "weight",
            torch.zeros(96, 160).to(torch.float8_e5m2),
            r"down_proj\.weight: expected float8_e4m3fn, found .*e5m2",
        ),
        ("weight", damaged, r"down_proj\.weight: has values that are not numbers"),
        (
            "weight_scale",
            torch.ones(2),
            r"weight_scale: expected shape \[96, 1\] or \[96\] or \[1\] or \[\], found \[2\]",
        ),
        ("weight_scale", torch.tensor(torch.inf), r"down_proj\.weight_scale: has values that are not finite"),
        ("weight_scale", torch.tensor(-0.5), r"down_proj\.weight_scale: must not be negative, found -0\.5"),
        ("input_scale", None, r"missing: model\.layers\.0\.mlp\.down_proj\.input_scale"),
        ("input_scale", torch.tensor(0.0), r"down_proj\.input_scale: must be positive, found 0\.0"),
    ]
    for suffix, tensor, message in cases:
        (tmp_path / "model.safetensors").write_bytes(original)
        edit_weights(tmp_path, **{f"model__layers__0__mlp__down_proj__{suffix}": tensor})
        with pytest.raises(ModelLoadError, match=message):
            load(tmp_path)


def test_a_weight_without_its_scale_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, TENSOR, lambda _, weight: pack("weight_scale", torch.tensor(0.5), weight))
    edit_weights(tmp_path, model__layers__1__mlp__up_proj__weight_scale=None)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight has type F8_E4M3.* have its scales"):
        load(tmp_path)


@pytest.mark.parametrize("config", [BLOCKS, TENSOR, TENSOR | {"activation_scheme": "static"}])
def test_random_weights(config: dict[str, Any]) -> None:
    weight = format_of(config).random(256, 320, torch.Generator().manual_seed(0))
    assert weight.shape == (256, 320)
    assert weight.dequantize().std() == pytest.approx(0.02, rel=0.1)
