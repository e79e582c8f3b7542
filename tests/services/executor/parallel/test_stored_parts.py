"""A rank reads the same part of a quantized weight that the whole has there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.linear import Linear, Split
from pagewire.services.executor.layers.parts import Index, StoredPart, select
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.weight_format import TensorSpec, WeightFormat, input_unit, output_unit
from pagewire.services.executor.layers.weights import Shard
from pagewire.services.executor.loading.quantization.gguf import GgufFormat
from pagewire.services.executor.loading.quantization.install import install_jobs, random_shards, read_shard
from pagewire.services.executor.loading.quantization.registry import quantization_of
from pagewire.services.executor.loading.weights.jobs import run_jobs
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from tests.services.executor.loading.quantization import test_awq, test_bitsandbytes, test_gptq
from tests.services.executor.loading.quantization.checkpoints import random_words
from tests.services.executor.loading.quantization.gguf_tensors import HALVES, random_blocks
from tests.services.executor.loading.quantization.test_compressed_tensors import DYNAMIC_INT8, FP8, INT4, INT8
from tests.services.executor.parallel.threads import on_ranks
from tests.sweep import examples

CPU = torch.device("cpu")
NUM_OUTPUTS, NUM_INPUTS = 256, 512
HALF = NUM_INPUTS // 2


def compressed(weights: Mapping[str, Any], stored: str, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"weights": weights, "targets": ["Linear"], "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}


GPTQ, AWQ = test_gptq.CONFIG | {"sym": False}, test_awq.CONFIG | {"group_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq-gemm": AWQ,
    "awq-gemv": AWQ | {"version": "gemv"},
    "awq-gemv-fast": AWQ | {"version": "gemv_fast"},
    "gptq": GPTQ,
    "gptq-v2": GPTQ | {"checkpoint_format": "gptq_v2"},
    "gptq-2-bits": GPTQ | {"bits": 2},
    "gptq-one-group": GPTQ | {"bits": 8, "group_size": -1},
    "gptq-act-order": GPTQ | {"desc_act": True},
    "packed": compressed(INT4 | {"symmetric": False}, "pack-quantized"),
    "packed-symmetric": compressed(INT4, "pack-quantized"),
    "int8": compressed(INT8, "int-quantized"),
    "w8a8": compressed(INT8, "int-quantized", DYNAMIC_INT8),
    "fp8-tensor": compressed(FP8 | {"strategy": "tensor"}, "float-quantized"),
    "fp8-channel": compressed(FP8, "float-quantized"),
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
    "nf4": test_bitsandbytes.NF4,
    "nf4-nested": test_bitsandbytes.NF4,
    "llm-int8": test_bitsandbytes.INT8,
}
NAMES = [*CONFIGS, *(type_.name for type_ in HALVES)]


def format_of(name: str) -> WeightFormat:
    if name not in CONFIGS:
        return GgufFormat(Type[name])
    found = quantization_of(CONFIGS[name], None).format("model.layers.0.mlp.up_proj")
    assert found is not None
    return found


class InMemory:
    """A checkpoint of one weight. `read_bytes` is how much was asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self._tensors = {f"w.{suffix}": tensor for suffix, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()} | dict(shapes or {})
        self.read_bytes = 0

    def raw(self, name: str, index: Sequence[Index] = (), view: Sequence[int] | None = None) -> Tensor:
        tensor = self._tensors[name]
        found = select(tensor if view is None else tensor.view(*view), index)
        self.read_bytes += found.nbytes
        return found

    def raw_dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def stored_bytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def read_into(self, name: str, target: Tensor, first_row: int = 0, part: StoredPart | None = None) -> None:
        raise NotImplementedError("the weight is quantized")


def source_of(name: str, seed: int) -> InMemory:
    if name not in CONFIGS:
        codes, _ = GGML_QUANT_SIZES[Type[name]]
        blocks = random_blocks(Type[name], NUM_OUTPUTS, NUM_INPUTS // codes, np.random.default_rng(seed))
        return InMemory({"weight": torch.from_numpy(blocks)}, {"w.weight": (NUM_OUTPUTS, NUM_INPUTS)})
    if name.startswith("nf4"):
        return InMemory(test_bitsandbytes.random_tensors(NUM_OUTPUTS, NUM_INPUTS, 64, name == "nf4-nested", seed))
    specs = format_of(name).tensors(NUM_OUTPUTS, NUM_INPUTS)
    num_groups = specs["scales"].shape[0] if "g_idx" in specs else 2
    tensors = {suffix: _random(suffix, spec, seed, num_groups) for suffix, spec in specs.items() if suffix != "bias"}
    return InMemory(tensors)


def _random(suffix: str, spec: TensorSpec, seed: int, num_groups: int) -> Tensor:
    dtype = spec.dtypes[0]
    if suffix.endswith("g_idx"):
        groups = torch.arange(NUM_INPUTS, dtype=torch.int32) // (32 if num_groups > 1 else NUM_INPUTS)
        is_ordered = spec.inputs is None or spec.inputs.count == 1
        return groups if is_ordered else groups[torch.randperm(NUM_INPUTS, generator=torch.manual_seed(seed))]
    if suffix == "weight_shape":
        return torch.tensor([NUM_OUTPUTS, NUM_INPUTS], dtype=dtype)
    if suffix == "weight_format":
        return torch.zeros((), dtype=dtype)
    if dtype is torch.float8_e4m3fn:
        return random_words(spec.shape, seed, torch.uint8).bitwise_and_(0xF7).view(dtype)
    if dtype.is_floating_point:
        return torch.rand(spec.shape, generator=torch.manual_seed(seed)).add_(0.1).to(dtype)
    words = random_words(spec.shape, seed, dtype)
    return words // 2 if suffix == "scales" else words  # of mxfp4: 255 is no number


@settings(max_examples=examples(50), deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES), seed=st.integers(0, 1000))
def test_any_part(data: st.DataObject, name: str, seed: int) -> None:
    weight_format = format_of(name)
    unit = input_unit(weight_format, NUM_OUTPUTS, NUM_INPUTS)
    start = data.draw(st.integers(0, NUM_INPUTS // unit - 1), "first unit of inputs")
    stop = data.draw(st.integers(start + 1, NUM_INPUTS // unit), "last unit of inputs")
    together = output_unit(weight_format, NUM_OUTPUTS, NUM_INPUTS)
    units = data.draw(
        st.lists(st.integers(0, NUM_OUTPUTS // together - 1), min_size=1, max_size=40, unique=True), "outputs"
    )
    rows = (torch.tensor(units)[:, None] * together + torch.arange(together)).flatten()
    inputs = range(start * unit, stop * unit)
    source = source_of(name, seed)
    whole = read_shard(source, Shard("w", NUM_OUTPUTS, NUM_INPUTS, weight_format), CPU).dequantize()
    part = read_shard(source, Shard("w", NUM_OUTPUTS, NUM_INPUTS, weight_format, rows=rows, inputs=inputs), CPU)
    assert part.shape == (len(rows), len(inputs))
    torch.testing.assert_close(
        part.dequantize(), whole[rows][:, inputs.start : inputs.stop], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", NAMES)
def test_ranks_read_their_share_of_the_bytes(name: str) -> None:
    weight_format, num_ranks = format_of(name), 2
    unit = input_unit(weight_format, NUM_OUTPUTS, NUM_INPUTS)
    shares: list[dict[str, Any]] = [{"rows": torch.arange(rank * 128, (rank + 1) * 128)} for rank in range(num_ranks)]
    if unit <= HALF:
        shares += [{"inputs": range(rank * HALF, (rank + 1) * HALF)} for rank in range(num_ranks)]
    for share in shares:
        source = source_of(name, 0)
        read_shard(source, Shard("w", NUM_OUTPUTS, NUM_INPUTS, weight_format), CPU)
        whole, source.read_bytes = source.read_bytes, 0
        read_shard(source, Shard("w", NUM_OUTPUTS, NUM_INPUTS, weight_format, **share), CPU)
        # Of nf4, scales in blocks of a flattened weight are read whole; so is the order of inputs.
        assert source.read_bytes <= whole * 0.57


def test_inputs_in_another_order_cannot_be_split() -> None:
    assert input_unit(format_of("gptq-act-order"), NUM_OUTPUTS, NUM_INPUTS) == NUM_INPUTS
    source = source_of("gptq-act-order", 0)
    shard = Shard("w", NUM_OUTPUTS, NUM_INPUTS, format_of("gptq"), inputs=range(HALF))
    with pytest.raises(ModelLoadError, match="g_idx"):
        read_shard(source, shard, CPU)


@pytest.mark.parametrize("name", NAMES)
def test_random_weights_are_shared_too(name: str) -> None:
    """Tests --load-format dummy: all ranks together have the weights of one."""
    weight_format, read = format_of(name), random_shards(3, torch.float32, CPU)
    whole = read(Shard("w", NUM_OUTPUTS, NUM_INPUTS, weight_format))
    inputs = range(HALF, NUM_INPUTS) if input_unit(weight_format, NUM_OUTPUTS, NUM_INPUTS) <= HALF else None
    rows = torch.arange(128, 256)
    part = read(Shard("w", NUM_OUTPUTS, NUM_INPUTS, weight_format, rows=rows, inputs=inputs))
    assert not isinstance(whole, Tensor) and not isinstance(part, Tensor)
    expected = whole.dequantize()[128:]
    assert torch.equal(part.dequantize(), expected if inputs is None else expected[:, HALF:])


class Everything:
    """Quantization of all modules alike."""

    method = "everything"

    def __init__(self, weight_format: WeightFormat) -> None:
        self._format = weight_format

    def format(self, module: str) -> WeightFormat:
        return self._format


@pytest.mark.parametrize(("name", "outputs"), [("fp8-block", [256, 128]), ("gptq-act-order", [192, 192])])
def test_inputs_that_cannot_be_split_are_gathered(name: str, outputs: list[int]) -> None:
    """Outputs are split instead, in whole blocks."""
    quantization, x = Everything(format_of(name)), torch.randn(3, 384, generator=torch.manual_seed(0))

    def product(ranks: Communicator) -> tuple[int, Tensor]:
        placement = Placement(torch.float32, CPU, quantization, tensor=ranks)
        layer = Linear(384, {"w": 384}, placement, bias=True, split=Split.INPUTS)
        for _, bias in layer.load_targets():
            bias.copy_(torch.arange(384.0)[: len(bias)] if ranks.size == 1 else layer_bias(layer))
        run_jobs(install_jobs([layer], random_shards(1, torch.float32, CPU), lambda shard: 1), 1, lambda *_: None)
        own = x[:, ranks.rank * (384 // ranks.size) : (ranks.rank + 1) * (384 // ranks.size)].contiguous()
        return layer.shards[0].num_outputs, layer(own)

    _, expected = product(ALONE)
    found = on_ranks(2, product)
    assert [num_outputs for num_outputs, _ in found] == outputs
    for _, result in found:
        torch.testing.assert_close(result, expected)


def layer_bias(layer: Linear) -> Tensor:
    rows = layer.shards[0].rows
    assert rows is not None
    return rows.float()
