"""A copy of a model with weights of fewer bits. Everything else is shared, including the KV cache."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.config import model_refusals
from pagewire.errors import StartupError
from pagewire.kernels import ops
from pagewire.kernels.cpu.layouts import packed_layout
from pagewire.kernels.quantized import GroupedWeight, PackedGrouped, PackedWeight, pack
from pagewire.kernels.quantized.packed import PackedFp8, PackedInt8, RoughGrouped, unpack
from pagewire.services.executor.layers.experts.routing import Router
from pagewire.services.executor.layers.weights import Dense, PackedDense, WeightModule
from pagewire.services.executor.loading.twins import twins
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.parallel.communicator import ALONE, Communicator

GROUP_SIZE = 32  # inputs that share a scale and a minimum
HEAD_BITS = 8  # minimum of the output projection: its loss affects every draft
_CHUNK = 1 << 20  # weights that are rounded at a time, in a few dozen milliseconds


def quantized_copy(model: OwnModel, bits: int, ranks: Communicator = ALONE) -> OwnModel:
    """Returns a copy of a loaded model, before or after the model has a KV cache. The copy shares norms, biases,
    routers, lookup tables, weights of at most `bits` bits, and whole caching layers with the model.

    ranks: the ranks that split its layers. Raises StartupError if no weight would be smaller.
    """
    twin = shared_copy(model, ranks)
    bits_of = ((part, _bits_of(module, model, bits)) for module, _ in _pairs(model, twin) for part in module.parts)
    if all(_is_rounded(*pair) for pair in bits_of):
        raise StartupError(model_refusals.of_copy(bits))
    for _ in rounding(twin, model, bits):
        pass
    return twin


def shared_copy(model: OwnModel, ranks: Communicator = ALONE) -> OwnModel:
    """Returns a copy that shares all tensors with the model, until `rounding` gives it its own weights."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor, _ in twins(model, model)}
    shared |= {id(layer): layer for layer in (*model.caching_layers, ranks)}
    twin: OwnModel = copy.deepcopy(model, shared)
    return twin


def rounding(twin: OwnModel, model: OwnModel, bits: int, *, in_place: bool = False) -> Iterator[None]:
    """Rounds the model's weights for its copy, a piece with each step of the iterator. in_place: the copy has rounded
    weights already, and keeps their memory."""
    for module, copied in _pairs(model, twin):
        parts = list[PackedWeight]()
        for part in module.parts:
            parts.append((yield from _rounded(part, _bits_of(module, model, bits))))
        if not in_place:
            copied.install(parts)
            continue
        for target, part in zip(copied.parts, parts, strict=True):
            for old, new in twins(target, part):
                if old is not new:
                    old.copy_(new)


def refresh(twin: OwnModel, model: OwnModel, bits: int) -> None:
    """Rounds the model's new weights, in place."""
    for _ in rounding(twin, model, bits, in_place=True):
        pass


def saved_bytes(model: OwnModel, bits: int) -> tuple[int, int]:
    """Returns the bytes of the weights that a copy would have of its own, and those of the dense weights that it would
    not read."""
    own = replaced = 0
    for module in model.modules():
        for part in module.parts if module.multiplies and not isinstance(module, Router) else ():
            if isinstance(part, Dense | PackedDense):
                num_weights = part.shape[0] * part.shape[1]
                # Each group has a scale and a minimum of 16 bits.
                own += num_weights * (_bits_of(module, model, bits) + 32 // GROUP_SIZE) // 8
                replaced += part.nbytes
    return own, replaced


def _pairs(model: OwnModel, twin: OwnModel) -> Iterator[tuple[WeightModule, WeightModule]]:
    """Yields the modules with rounded weights, and their copies."""
    for module, copied in zip(model.modules(), twin.modules(), strict=True):
        if module.multiplies and not isinstance(module, Router):
            yield module, copied


def _bits_of(module: WeightModule, model: OwnModel, bits: int) -> int:
    is_head = module.shards[0].out_features == model.config.vocab_size
    return max(bits, HEAD_BITS) if is_head else bits


def _is_rounded(part: PackedWeight, bits: int) -> bool:
    return isinstance(part, PackedGrouped) and part.bits <= bits


def _rounded(part: PackedWeight, bits: int) -> Generator[None, None, PackedWeight]:
    if _is_rounded(part, bits):
        return part
    if isinstance(part, PackedGrouped | PackedInt8 | PackedFp8):
        stored = unpack(part)
        return _packed(round_to_nearest([stored.dequantize()], bits))
    assert isinstance(part, Dense | PackedDense), type(part)
    tile = packed_layout.TILE
    pieces = _rows(part, max(1, _CHUNK // (part.shape[1] * tile)) * tile)
    if part.tensor.is_cuda or ops.cpu_backend() != "cpp":
        return _packed(round_to_nearest(pieces, bits))
    packed = list[PackedGrouped]()
    for rows in pieces:
        one = _packed(round_to_nearest([rows], bits))
        assert isinstance(one, PackedGrouped)
        packed.append(one)
        yield
    return _stacked(packed, part.shape)


def _stacked(pieces: list[PackedGrouped], shape: tuple[int, int]) -> PackedGrouped:
    """Returns one weight with the rows of all pieces, which are whole tiles in the layout "cpu"."""
    first = pieces[0]
    codes, scales = (torch.cat([getattr(one, name) for one in pieces]) for name in ("codes", "scales"))
    offsets = torch.cat([one.offsets for one in pieces if one.offsets is not None])
    return replace(first, shape=shape, codes=codes, scales=scales, offsets=offsets)


def _rows(part: Dense | PackedDense, at_once: int) -> Iterator[Tensor]:
    """Yields the rows of a weight, about so many at once."""
    if isinstance(part, Dense):
        yield from part.tensor.split(at_once)
        return
    num_outputs, num_inputs = part.shape
    tiles = -(-at_once // packed_layout.TILE)
    for first in range(0, len(part.tensor), tiles):
        left = num_outputs - first * packed_layout.TILE
        packed = part.tensor[first : first + tiles]
        yield packed_layout.unpack(packed, min(left, len(packed) * packed_layout.TILE), num_inputs)


def _packed(weight: GroupedWeight) -> PackedWeight:
    packed = pack(weight)
    if not isinstance(packed, PackedGrouped) or packed.layout != "cpu":
        return packed
    return RoughGrouped(**{field.name: getattr(packed, field.name) for field in fields(packed)})


def round_to_nearest(weights: Iterable[Tensor], bits: int) -> GroupedWeight:
    """Rounds one weight [N, K], given by rows in any float dtype. Each group of a row spans its least and its greatest
    weight: weight = scale * code + minimum."""
    parts = [_rounded_rows(rows.float(), bits) for rows in weights]
    codes, scales, minimums = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return GroupedWeight(codes, bits, min(GROUP_SIZE, codes.shape[1]), scales, offsets=minimums)


def _rounded_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [n, K] -> codes uint8 [n, K], scales and minimums float16 [n, G]"""
    num_inputs = rows.shape[1]
    size = min(GROUP_SIZE, num_inputs)
    groups = F.pad(rows, (0, -num_inputs % size), mode="replicate").unflatten(1, (-1, size))
    low, high = groups.aminmax(dim=2)
    minimums = low.half()
    scales = ((high - minimums.float()) / (2**bits - 1)).half()
    steps = scales.float().clamp(min=torch.finfo(torch.float16).tiny)
    codes = (groups - minimums.float()[:, :, None]).div_(steps[:, :, None]).round_().clamp_(0, 2**bits - 1)
    return codes.to(torch.uint8).flatten(1)[:, :num_inputs].contiguous(), scales, minimums
