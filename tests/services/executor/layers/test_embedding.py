"""The weights that an embedding takes: rows must be those that the model looks up."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pagewire.kernels.quantized import Fp8Weight, GroupedWeight, PackedFp8, QuantizedWeight, pack
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.weight_format import Part, TensorSpec


class AnyFormat:
    """The format of a weight that a test makes itself."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        raise NotImplementedError

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> QuantizedWeight:
        raise NotImplementedError

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> QuantizedWeight:
        raise NotImplementedError


class Everything:
    method = "everything"

    def format(self, module: str) -> AnyFormat:
        return AnyFormat()


@pytest.fixture
def embedding() -> Embedding:
    return Embedding("embed_tokens", 48, 64, Placement(torch.float32, torch.device("cpu"), Everything(), "model."))


def grouped(permutation: Tensor | None) -> GroupedWeight:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (48, 64), dtype=torch.uint8, generator=generator)
    scales = torch.rand(48, 2, generator=generator)
    return GroupedWeight(codes, 4, 32, scales, zero_point=8, permutation=permutation)


def test_rows_of_a_grouped_weight(embedding: Embedding) -> None:
    weight, token_ids = grouped(None), torch.tensor([0, 47, 5, 5])
    embedding.install([pack(weight)])
    torch.testing.assert_close(embedding(token_ids), weight.dequantize()[token_ids])


def test_act_order_is_refused(embedding: Embedding) -> None:
    reversed_inputs = torch.arange(63, -1, -1, dtype=torch.int32)
    with pytest.raises(ModelLoadError, match=r"module model\.embed_tokens: .*act-order.*; leave it unquantized"):
        embedding.install([pack(grouped(reversed_inputs))])


def fp8() -> Fp8Weight:
    return Fp8Weight(torch.randn(48, 64).to(torch.float8_e4m3fn), torch.rand(48))


def test_rows_of_an_fp8_weight(embedding: Embedding) -> None:
    """Rows on a CPU, where an fp8 weight has groups."""
    weight, token_ids = fp8(), torch.tensor([0, 47, 5, 5])
    embedding.install([pack(weight)])
    torch.testing.assert_close(embedding(token_ids), weight.dequantize()[token_ids])


def test_fp8_as_a_gpu_holds_it_is_refused(embedding: Embedding) -> None:
    weight = fp8()
    with pytest.raises(ModelLoadError, match=r"module model\.embed_tokens: .*fp8.*; leave it unquantized"):
        embedding.install([PackedFp8(weight.weight, weight.scales)])
