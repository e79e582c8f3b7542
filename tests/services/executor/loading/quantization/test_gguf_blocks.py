"""Blocks of GGUF files: every number as the gguf package decodes it, bit by bit."""

from __future__ import annotations

import logging
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.quantization import gguf_blocks
from pagewire.services.executor.loading.quantization.gguf import GgufFormat, GgufQuantization
from tests.services.executor.loading.quantization.gguf_tensors import HALVES, random_blocks
from tests.sweep import examples

TYPES = list(HALVES)
K_QUANTS = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS)


def assert_decoded(blocks: np.ndarray, type_: Type) -> None:
    weight = gguf_blocks.decode(torch.from_numpy(blocks), type_)
    with np.errstate(over="ignore"):  # the largest scales of MXFP4 make infinities of the largest codes
        expected = gguf.dequantize(blocks, type_)
    assert weight.shape == expected.shape
    assert int(weight.codes.max()) < 1 << weight.bits
    np.testing.assert_array_equal(weight.dequantize().numpy().view(np.int32), expected.view(np.int32))


def test_all_types_are_covered() -> None:
    assert set(gguf_blocks.FORMS) == set(TYPES)


@settings(max_examples=examples(120), deadline=None)
@given(
    type_=st.sampled_from(TYPES),
    num_rows=st.integers(1, 9),
    blocks_per_row=st.integers(1, 5),
    chunk_codes=st.integers(1, 4096),
    seed=st.integers(0, 1 << 32),
)
def test_any_block(type_: Type, num_rows: int, blocks_per_row: int, chunk_codes: int, seed: int) -> None:
    blocks = random_blocks(type_, num_rows, blocks_per_row, np.random.default_rng(seed))
    with patch.object(gguf_blocks, "_CHUNK_CODES", chunk_codes):
        assert_decoded(blocks, type_)


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda t: t.name)
def test_quantized_weights(type_: Type) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, (64, 576)).astype(np.float32)
    blocks = gguf.quantize(values, type_)
    assert_decoded(blocks, type_)
    weight = gguf_blocks.decode(torch.from_numpy(blocks), type_)
    step = weight.flat_scales().abs().repeat_interleave(32, dim=1).numpy()
    assert (np.abs(weight.dequantize().numpy() - values) <= 1.02 * step).all()


@pytest.mark.parametrize("type_", [type_ for type_ in TYPES if type_ is not Type.MXFP4], ids=lambda t: t.name)
def test_scales_stay_as_small_as_in_the_file(type_: Type) -> None:
    """Codes take a byte each here; the rest less than twice what it takes in the file: a byte for 4 or 6 bits."""
    block_codes, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    weight = gguf_blocks.decode(torch.from_numpy(random_blocks(type_, 4, 3, np.random.default_rng(0))), type_)
    rest = [weight.scales, weight.super_scales, weight.offsets, weight.super_offsets]
    num_bytes = sum(tensor.nbytes for tensor in rest if tensor is not None) / 12
    assert num_bytes < 2 * (block_bytes - block_codes * weight.bits // 8)
    assert (weight.super_scales is not None) == (type_ in K_QUANTS)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_halves_that_are_not_finite_are_refused(type_: Type, bad: float) -> None:
    block_codes, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    for start in HALVES[type_]:
        blocks = random_blocks(type_, 6, 2, np.random.default_rng(0))
        at = block_bytes + start  # the row's second block
        blocks[4, at : at + 2] = np.array([bad], "<f2").view(np.uint8)
        with pytest.raises(ModelLoadError, match=rf"weight: {type_.name} row 4 has a scale that is infinite or NaN"):
            GgufFormat(type_).read({"weight": torch.from_numpy(blocks)}, 6, 2 * block_codes)


def test_an_exponent_that_is_no_number_is_refused() -> None:
    blocks = random_blocks(Type.MXFP4, 6, 2, np.random.default_rng(0))
    blocks[4, 17] = 255
    with pytest.raises(ModelLoadError, match=r"weight: MXFP4 row 4 has a scale that is infinite or NaN; .* convert it"):
        GgufFormat(Type.MXFP4).read({"weight": torch.from_numpy(blocks)}, 6, 64)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_random_weights(type_: Type) -> None:
    """Random weights have the form of read ones, so that dummy weights run the same kernels."""
    format_ = GgufFormat(type_)
    weight = format_.random(32, 512, torch.Generator().manual_seed(0))
    block_codes, _ = gguf.GGML_QUANT_SIZES[type_]
    blocks = random_blocks(type_, 32, 512 // block_codes, np.random.default_rng(0))
    assert weight.stacks_with(format_.read({"weight": torch.from_numpy(blocks)}, 32, 512))
    values = weight.dequantize()
    assert abs(values.mean().item()) < 0.01
    assert 0.01 < values.std().item() < 0.03
    with pytest.raises(ModelLoadError, match=rf"{type_.name} has blocks of {block_codes}"):
        format_.random(32, 16, torch.Generator())


def test_format_of_a_module_is_its_tensors(caplog: pytest.LogCaptureFixture) -> None:
    types = {
        "a.weight": Type.Q6_K,
        "a.bias": Type.F32,
        "b.weight": Type.F16,
        "c.weight": Type.BF16,
        "d.weight": Type.IQ2_XS,
        "e.weight": Type.IQ2_XS,
        "f.weight": Type.TQ1_0,
    }
    with caplog.at_level(logging.WARNING):
        quantization = GgufQuantization(types)
    assert [record.getMessage() for record in caplog.records] == [
        "tensors that are dequantized, as there is no kernel for them: 2 of type IQ2_XS, 1 of type TQ1_0"
    ]
    assert quantization.method == "gguf"
    assert quantization.format("a") == GgufFormat(Type.Q6_K)
    assert [module for module in "abcdefg" if quantization.format(module) is not None] == ["a"]
