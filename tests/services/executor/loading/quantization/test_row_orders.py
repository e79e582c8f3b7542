"""Projections with rows in another order in a quantized checkpoint than in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.quantized import Fp8Weight, GroupedWeight, Int8Weight, QuantizedWeight, take_rows
from pagewire.services.executor.config.model_config import ModelLoadError
from tests.services.executor.loading.quantization.checkpoints import assert_loads_as, save_quantized
from tests.services.executor.loading.quantization.test_compressed_tensors import INT4, config_of, pack_int4
from tests.services.executor.loading.quantization.test_fp8 import BLOCKS, pack, random_fp8
from tests.services.executor.models.test_models import load
from tests.sweep import examples


def weights(num_outputs: int) -> list[QuantizedWeight]:
    """Returns a weight of each form with outputs that are free to move."""
    codes = torch.randint(0, 16, (num_outputs, 64)).byte()
    zeros = torch.randint(0, 16, (num_outputs, 2)).byte()
    return [
        GroupedWeight(codes, 4, 32, torch.rand(num_outputs, 2), offsets=zeros),
        GroupedWeight(codes, 4, 32, torch.rand(num_outputs, 2), permutation=torch.randperm(64).int()),
        Int8Weight(torch.randint(-128, 128, (num_outputs, 64), dtype=torch.int8), torch.rand(num_outputs)),
        Fp8Weight(random_fp8((num_outputs, 64), 0), torch.rand(num_outputs)),
    ]


@given(st.integers(1, 40).flatmap(lambda n: st.permutations(range(n))))
@settings(max_examples=examples(20), deadline=None)
def test_rows_are_taken(order: list[int]) -> None:
    for weight in weights(len(order)):
        taken = take_rows(weight, torch.tensor(order))
        assert torch.equal(taken.dequantize(), weight.dequantize()[order])


def test_rows_of_a_block_stay_together() -> None:
    weight = Fp8Weight(random_fp8((300, 64), 0), torch.rand(3, 1))
    within = torch.cat([torch.arange(128, 256), torch.arange(128).flip(0), torch.arange(256, 300)])
    assert torch.equal(take_rows(weight, within).dequantize(), weight.dequantize()[within])
    with pytest.raises(ValueError, match="rows of one block of 128 would come from several"):
        take_rows(weight, torch.arange(300).flip(0))


@pytest.mark.parametrize("family", ["GPTNeoX", "Cohere", "Glm4", "Phi3", "Olmo2"])
def test_quantized_models_of_families(tmp_path: Path, family: str) -> None:
    sizes: dict[str, Any] = {"head_dim": 16} if family == "Glm4" else {}
    config = config_of(INT4, ignore=["lm_head", "embed_out"])
    expected = save_quantized(tmp_path, config, lambda _, weight: pack_int4(weight, 32), family=family, **sizes)
    assert_loads_as(tmp_path, expected)


def test_blocks_that_rows_would_leave_are_named(tmp_path: Path) -> None:
    scales = torch.full((4, 4), 0.01, dtype=torch.bfloat16)
    save_quantized(tmp_path, BLOCKS, lambda _, weight: pack("weight_scale_inv", scales, weight), family="GPTNeoX")
    with pytest.raises(ModelLoadError, match=r"query_key_value: its rows must change places, but .* scale per output"):
        load(tmp_path)
