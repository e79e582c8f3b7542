"""Products with quantized weights to measure ours against, each as a call per copy of the weight.

torch's dense product (its weight in several layouts, of which the best counts) and tinygemm; Marlin and Machete from
vLLM's library; GemLite; the plain Triton kernel on the checkpoint's layout; torch's product of fp8 and of int8. Weights
are rearranged beforehand, as each wants them, from `Weights.weight`.

What Marlin, Machete and GemLite want was read in vLLM 0.23.0 (`model_executor/kernels/linear/mixed_precision`,
`quantization/utils/marlin_utils.py`) and in GemLite 0.6.0 (`core.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cases.case import Contestant
from benchmarks.gpu.cases.product_inputs import Layout, Weights
from benchmarks.gpu.measure import relative_error
from benchmarks.gpu.peer_kernels import checkpoint_product
from benchmarks.gpu.peer_kernels import files as peer_files
from benchmarks.gpu.peer_kernels.files import PeerMissingError
from pagewire.kernels.quantized import GroupedWeight, PackedGrouped
from pagewire.kernels.triton.products import grouped_dequantize
from pagewire.kernels.triton.products.quantize_input import quantize_groups, quantize_tokens

# vLLM's numbers of the types of a code: 4 or 8 bits without a sign; the zero point is stored, or half the range.
_SHIFT_OF_BITS, _SHIFT_OF_ZERO_POINT, _TYPE = 8, 17, 1 << 50
# Columns of 8 x 8 scales in the order in which Marlin's threads read them; of 32 where each output has one scale.
_MARLIN_COLUMNS = [row + 8 * column for row in range(8) for column in range(8)]
_MARLIN_SINGLE_COLUMNS = [2 * row + column for row in range(4) for column in (0, 1, 8, 9, 16, 17, 24, 25)]
_MARLIN_NIBBLES = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}
_GEMLITE_SHAPES = {(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (37888, 3584), (3584, 18944)}
_INT_MM_MIN_TOKENS = 17

# Larger than ours: some add partial sums in bf16, and torch's dense product rounds no activations.
PEER_TOLERANCE = 2e-2

Expected = Sequence[Tensor]  # [num_tokens, num_outputs] each: what the product may be
Peer = Callable[[Weights, Tensor, Expected], dict[str, Contestant]]


def contestant(calls: Sequence[Callable[[], Any]], expected: Expected, tolerance: float) -> Contestant:
    """Returns a contestant; its error is the distance to the closest expected result."""

    def error() -> float:
        out = calls[0]()
        return min(relative_error(out, right) for right in expected)

    return Contestant(list(calls), error, tolerance)


def _peer(layouts: list[Layout], call: Callable[..., Any], expected: Expected) -> Contestant:
    """call: of the tensors of a layout"""
    return contestant([partial(call, *layout) for layout in layouts], expected, PEER_TOLERANCE)


def torch_dense(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    """Returns dense products in the dtype of x: the weight as [N, K] and as [K, N], and the product transposed."""
    rows = weights.layout("nk", lambda: (weights.dense(),))
    columns = weights.layout("kn", lambda: (weights.dense().t().contiguous(),))
    return {
        "torch (nk)": _peer(rows, partial(F.linear, x), expected),
        "torch (kn)": _peer(columns, partial(torch.mm, x), expected),
        "torch (nm)": _peer(rows, lambda weight: torch.mm(weight, x.t()).t(), expected),
    }


def dequantized(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    """Our packed weight, made dense before each product."""

    def multiply(packed: PackedGrouped) -> Tensor:
        weight = (packed.codes, packed.scales, packed.offsets, packed.codebook, packed.shape)
        form = (packed.bits, packed.group_size, packed.zero_point)
        return F.linear(x, grouped_dequantize.dequantize(*weight, *form, x.dtype))

    packed = [weight for weight in weights.packed if isinstance(weight, PackedGrouped) and weight.permutation is None]
    if not packed:
        raise PeerMissingError("its codes are in no groups, or in another order")
    return {"dequantized": contestant([partial(multiply, weight) for weight in packed], expected, PEER_TOLERANCE)}


def _grouped(weights: Weights, *, minimums: bool = False, permuted: bool = False) -> GroupedWeight:
    weight: GroupedWeight = weights.weight
    if weight.flat_minimums() is not None and not minimums:
        raise PeerMissingError("it has no minimums, only zero points")
    if weight.permutation is not None and not permuted:
        raise PeerMissingError("it has no act-order")
    return weight


def _words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, columns] -> int32 [rows, columns * bits / 32], the first code in the lowest bits"""
    per_word = 32 // bits
    fields = codes.reshape(codes.shape[0], -1, per_word).int()
    words = torch.zeros(fields.shape[:2], dtype=torch.int32, device=codes.device)
    for index in range(per_word):
        words |= fields[:, :, index] << (bits * index)
    return words


def tinygemm(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    """Returns torch's own product: bf16, (code - 8) * scale + zero."""
    weight = _grouped(weights, minimums=True)
    if x.dtype != torch.bfloat16 or weight.bits != 4:
        raise PeerMissingError("tinygemm multiplies bf16 with 4 bits")

    def build() -> Layout:
        scales, minimums, zeros = weight.flat_scales(), weight.flat_minimums(), weight.flat_zeros()
        if minimums is None:
            assert zeros is not None
            minimums = -zeros * scales
        pairs = weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
        numbers = torch.stack((scales, minimums + 8 * scales), dim=-1).transpose(0, 1)
        return packed, numbers.to(x.dtype).contiguous()

    def call(packed: Tensor, numbers: Tensor) -> Any:
        return torch.ops.aten._weight_int4pack_mm(x, packed, weight.group_size, numbers)

    return {"tinygemm": _peer(weights.layout("tinygemm", build), call, expected)}


def _type_id(weight: GroupedWeight) -> int:
    zero_point = weight.zero_point if weight.offsets is None else 0
    return weight.bits << _SHIFT_OF_BITS | zero_point << _SHIFT_OF_ZERO_POINT | _TYPE


def marlin_scales(scales: Tensor) -> Tensor:
    """Returns [groups, N] with the columns in Marlin's order."""
    order = _MARLIN_COLUMNS if scales.shape[0] > 1 else _MARLIN_SINGLE_COLUMNS
    return scales.reshape(-1, len(order))[:, order].reshape(scales.shape).contiguous()


def marlin_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Packs uint8 [groups, N] into int32 [groups, N * bits / 32]."""
    ordered = zeros.reshape(-1, len(_MARLIN_COLUMNS))[:, _MARLIN_COLUMNS]
    nibbles = _MARLIN_NIBBLES[bits]
    return _words(ordered.reshape(-1, len(nibbles))[:, nibbles].reshape(zeros.shape), bits)


def marlin(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    weight, ops = _grouped(weights, permuted=True), peer_files.vllm()
    (num_tokens, num_inputs), num_outputs, bits = x.shape, weights.num_outputs, weight.bits
    nothing = torch.empty(0, dtype=torch.int32, device=x.device)
    locks = torch.zeros(
        torch.cuda.get_device_properties(x.device).multi_processor_count, dtype=torch.int32, device=x.device
    )

    def build() -> Layout:
        codes, order, groups = weight.codes, nothing, nothing
        if weight.permutation is not None:
            order = weight.permutation
            codes = torch.empty_like(codes).index_copy_(1, order.long(), codes)
            groups = torch.arange(num_inputs, dtype=torch.int32, device=x.device) // weight.group_size
        words = _words(codes, bits).t().contiguous()
        zeros = nothing if weight.offsets is None else marlin_zeros(weight.offsets.t().contiguous(), bits)
        packed = ops.gptq_marlin_repack(words, order, num_inputs, num_outputs, bits, False)
        return packed, marlin_scales(weight.scales.t().to(x.dtype)), zeros, groups, order

    def call(packed: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, order: Tensor) -> Any:
        # No bias, scales of activations, global scale; all inputs, fp32 sums without atomics, integer zero points.
        return ops.marlin_gemm(
            x, None, packed, None, scales, None, None, zeros, groups, order, locks, _type_id(weight),
            num_tokens, num_outputs, num_inputs, True, False, True, False,
        )  # fmt: skip

    return {"marlin": _peer(weights.layout("marlin", build), call, expected)}


def machete(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    weight, ops = _grouped(weights), peer_files.vllm()
    if weight.group_size not in (64, 128, weights.num_inputs):
        raise PeerMissingError(f"Machete has no groups of {weight.group_size}")
    type_id = _type_id(weight)

    def build() -> Layout:
        words = _words(weight.codes, weight.bits).t()  # column-major, as it is wanted
        packed = ops.machete_prepack_B(words, x.dtype, type_id, x.dtype)
        scales = weight.scales.t().to(x.dtype).contiguous()
        if weight.offsets is None:
            return packed, scales
        return packed, scales, -scales * weight.offsets.t().to(x.dtype)

    def call(packed: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Any:
        return ops.machete_mm(x, packed, type_id, None, scales, zeros, weight.group_size, None, None, None)

    return {"machete": _peer(weights.layout("machete", build), call, expected)}


def gemlite(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    """Returns GemLite with the configurations that it ships for the H100; other shapes would take long to tune."""
    weight, package = _grouped(weights), peer_files.gemlite()
    if (weights.num_outputs, weights.num_inputs) not in _GEMLITE_SHAPES or weight.group_size != 128:
        raise PeerMissingError("GemLite ships no configuration for this shape or group size")

    def build() -> Layout:
        dtype = {torch.float16: package.DType.FP16, torch.bfloat16: package.DType.BF16}[x.dtype]
        linear = package.GemLiteLinear(
            W_nbits=weight.bits, group_size=weight.group_size, in_features=weights.num_inputs,
            out_features=weights.num_outputs, input_dtype=dtype, output_dtype=dtype,
        )  # fmt: skip
        zeros = weight.zero_point if weight.offsets is None else weight.offsets.to(x.dtype)
        linear.pack(weight.codes, weight.scales.to(x.dtype), zeros)
        facts = torch.tensor(linear.get_meta_args())  # what its calls need to know besides, the same in every copy
        return *(tensor.detach() for tensor in linear.get_tensor_args()), facts

    layouts = weights.layout("gemlite", build)
    facts = layouts[0][-1].tolist()

    def call(*tensors: Tensor) -> Any:
        return package.forward_functional(x, None, list(tensors[:-1]), facts)

    return {"gemlite": _peer(layouts, call, expected)}


def checkpoint(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    """The plain Triton kernel on AWQ's layout."""
    weight = _grouped(weights)
    if weight.offsets is None or weight.bits != 4 or weight.group_size % checkpoint_product.BLOCK_K:
        raise PeerMissingError("the kernel on the checkpoint's layout is AWQ's")
    layouts = weights.layout("checkpoint", lambda: checkpoint_product.awq_layout(weight))
    call = partial(checkpoint_product.awq_product, x)
    return {"checkpoint": _peer(layouts, call, expected)}


def scaled_mm(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    """Returns torch's product of fp8: alone, its input quantized beforehand, and with our kernel that quantizes."""
    weight, blocks, num_tokens = weights.weight, weights.weight.scales.dim() == 2, x.shape[0]
    if blocks:  # it multiplies whole quadruples of tokens then
        x = F.pad(x, (0, 0, 0, -num_tokens % 4))

    def build() -> Layout:
        return weight.weight, weight.scales if blocks else weight.scales[None, :]

    def quantize() -> tuple[Tensor, Tensor]:
        if blocks:
            codes, scales = quantize_groups(x)
            return codes, scales.t()
        codes, scales = quantize_tokens(x, None, torch.float8_e4m3fn)
        return codes, scales[:, None]

    def product(codes: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        out = torch._scaled_mm(
            codes, weight.t(), x_scales, scales.t() if blocks else scales, out_dtype=x.dtype, use_fast_accum=not blocks
        )
        return out[:num_tokens]

    layouts = weights.layout("scaled_mm", build)
    codes, x_scales = quantize()
    return {
        "scaled_mm": _peer(layouts, partial(product, codes, x_scales), expected),
        "quantize+scaled_mm": _peer(layouts, lambda *layout: product(*quantize(), *layout), expected),
    }


def int_mm(weights: Weights, x: Tensor, expected: Expected) -> dict[str, Contestant]:
    """Returns torch's product of int8, without the scales: int32 of an input quantized beforehand."""
    if x.shape[0] < _INT_MM_MIN_TOKENS:
        raise PeerMissingError(f"torch._int_mm needs {_INT_MM_MIN_TOKENS} tokens")
    weight = weights.weight
    layouts = weights.layout("int_mm", lambda: (weight.weight,))
    codes, x_scales = quantize_tokens(x, None, torch.int8)

    def call(weight: Tensor) -> Tensor:
        return torch._int_mm(codes, weight.t())

    def error() -> float:
        product = call(*layouts[0]) * x_scales[:, None] * weight.scales
        return min(relative_error(product, right) for right in expected)

    return {"int_mm": Contestant([partial(call, *layout) for layout in layouts], error, PEER_TOLERANCE)}


# By the names that `product_cases` has them under.
PEERS: dict[str, Peer] = {
    "torch": torch_dense,
    "dequantized": dequantized,
    "tinygemm": tinygemm,
    "marlin": marlin,
    "machete": machete,
    "gemlite": gemlite,
    "checkpoint": checkpoint,
    "scaled_mm": scaled_mm,
    "int_mm": int_mm,
}
COMPILED_BY_TRITON = ("gemlite", "checkpoint", "scaled_mm", "int_mm")  # or what they call on the way
