"""Checkpoint layouts against decoders that follow their definitions element by element."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.quantize.config import QuantizeConfig
from pagewire.quantize.rounding.grid import Grid
from pagewire.quantize.rounding.layouts import LAYOUTS, awq_config, awq_tensors, gptq_config, gptq_tensors
from pagewire.services.executor.loading.quantization.registry import FORMATS
from tests.sweep import examples

_SHIFT_OF_COLUMN = [0, 16, 4, 20, 8, 24, 12, 28]  # AutoAWQ: bit at which column 0..7 of a word begins


def _bits(word: int, shift: int, bits: int) -> int:
    return ((word & 0xFFFFFFFF) >> shift) & (2**bits - 1)


def decode_awq(tensors: dict[str, Tensor], group_size: int) -> Tensor:
    """Returns float32 [N, K]"""
    words, zeros, scales = tensors["qweight"].tolist(), tensors["qzeros"].tolist(), tensors["scales"].float().tolist()
    return torch.tensor(
        [
            [
                scales[k // group_size][n]
                * (
                    _bits(words[k][n // 8], _SHIFT_OF_COLUMN[n % 8], 4)
                    - _bits(zeros[k // group_size][n // 8], _SHIFT_OF_COLUMN[n % 8], 4)
                )
                for k in range(len(words))
            ]
            for n in range(len(scales[0]))
        ]
    )


def decode_gptq(tensors: dict[str, Tensor], bits: int) -> Tensor:
    """Returns float32 [N, K]"""
    words, zeros, scales = tensors["qweight"].tolist(), tensors["qzeros"].tolist(), tensors["scales"].float().tolist()
    groups, per_word = tensors["g_idx"].tolist(), 32 // bits
    weight = []
    for n in range(len(scales[0])):
        row = []
        for k, group in enumerate(groups):
            code = _bits(words[k // per_word][n], bits * (k % per_word), bits)
            zero = _bits(zeros[group][n // per_word], bits * (n % per_word), bits) + 1
            row.append(scales[group][n] * (code - zero))
        weight.append(row)
    return torch.tensor(weight)


def random_weight(
    num_outputs: int, num_inputs: int, group_size: int, bits: int, seed: int, *, symmetric: bool, permuted: bool
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    num_groups, most = -(-num_inputs // group_size), 2**bits - 1

    def integers(low: int, *shape: int) -> Tensor:
        return torch.randint(low, most + 1, shape, generator=generator, dtype=torch.uint8)

    return GroupedWeight(
        codes=integers(0, num_outputs, num_inputs),
        bits=bits,
        group_size=group_size,
        scales=torch.rand(num_outputs, num_groups, generator=generator).half(),
        offsets=None if symmetric else integers(1, num_outputs, num_groups),
        zero_point=2 ** (bits - 1) if symmetric else 0,
        permutation=torch.randperm(num_inputs, generator=generator).int() if permuted else None,
    )


_SIZES = {
    "num_outputs": st.integers(1, 4).map(lambda words: 8 * words),
    "group_size": st.sampled_from([5, 8, 32]),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=examples(15), deadline=None)
@given(**_SIZES, num_inputs=st.integers(32, 80))
def test_awq(num_outputs: int, num_inputs: int, group_size: int, seed: int) -> None:
    weight = random_weight(num_outputs, num_inputs, group_size, 4, seed, symmetric=False, permuted=False)
    tensors = awq_tensors(weight)
    assert [(t.dtype, t.is_contiguous()) for t in tensors.values()] == [
        (torch.int32, True),
        (torch.int32, True),
        (torch.float16, True),
    ]
    assert torch.equal(decode_awq(tensors, group_size), weight.dequantize())


@settings(max_examples=examples(25), deadline=None)
@given(
    **_SIZES,
    num_inputs=st.integers(4, 10).map(lambda words: 8 * words),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    permuted=st.booleans(),
)
def test_gptq(
    num_outputs: int, num_inputs: int, group_size: int, seed: int, bits: int, symmetric: bool, permuted: bool
) -> None:
    weight = random_weight(num_outputs, num_inputs, group_size, bits, seed, symmetric=symmetric, permuted=permuted)
    tensors = gptq_tensors(weight)
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert torch.equal(decode_gptq(tensors, bits), weight.dequantize())
    if symmetric:
        assert set(tensors["qzeros"].flatten().tolist()) == {0x77777777 if bits == 4 else 0x7F7F7F7F}


def test_configs_say_what_readers_look_for() -> None:
    grid = Grid(4, 128, symmetric=True, min_zero=1)
    assert awq_config(grid) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    expected = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
    assert gptq_config(grid, desc_act=True, damp=0.01).items() >= (expected | {"checkpoint_format": "gptq"}).items()


def test_every_method_writes_what_the_executor_reads() -> None:
    (field,) = (field for field in dataclasses.fields(QuantizeConfig) if field.name == "method")
    assert set(field.metadata["choices"]) == LAYOUTS.keys()
    for layout in LAYOUTS.values():
        assert set(layout.bits) <= set(FORMATS[layout.name].bits)
