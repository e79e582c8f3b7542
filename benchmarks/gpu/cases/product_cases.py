"""Products with quantized weights: what is measured, in the order of its worth, and what is asked of ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.gpu.cases.case import IN_TURN, OURS, Built, Case, Contestant, Target, in_turn
from benchmarks.gpu.cases.product_inputs import Form, Fp8, Grouped, Int8, Weights
from benchmarks.gpu.peer_kernels.products import PEERS, contestant
from benchmarks.gpu.table import MeanTarget, Measured, first_line

Shape = tuple[int, int]  # outputs, inputs

# Llama-3.1-8B: gate and up, down, q/k/v, o; Qwen2.5-7B: gate and up, down; and a square one.
SHAPES: tuple[Shape, ...] = (
    (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (37888, 3584), (3584, 18944), (8192, 8192),
)  # fmt: skip
FEW_SHAPES = SHAPES[:1] + SHAPES[3:4]
SMALL_SHAPES: tuple[Shape, ...] = ((128, 256),)
# What `w4_cases` measures, in the first minutes on a GPU: gate and up, down, o.
W4_SHAPES, W4_TOKENS, W4_PEERS = (SHAPES[0], SHAPES[1], SHAPES[3]), (1, 16, 32, 64, 128, 512), ("torch", "marlin")
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 4096)
FEWER_TOKENS = (1, 8, 16, 32, 64, 128, 512, 2048)
FEW_TOKENS = (1, 16, 64, 512)
ONE_BYTE_TOKENS = (1, 16, 64, 512, 4096)
SMALL_TOKENS = (1, 17)

# tokens -> torch's time / ours in 16 bits: must, stretch
_LARGE = {1: (2.2, 3.0), 8: (2.1, 2.8), 16: (2.1, 2.8), 32: (1.8, 2.4), 64: (1.3, 1.8), 128: (0.9, 1.05)}
_SMALL_MUST = {1: 1.6, 8: 1.5, 16: 1.5, 32: 1.2, 64: 0.95, 128: 0.85}
_MANY, _LARGE_MANY, _SMALL_MANY_MUST = 512, (0.85, 0.95), 0.8
_LARGE_WEIGHT_BYTES = 30_000_000
# A share of the copy bandwidth, where the weight is all that takes time.
_BANDWIDTH_SHAPE, _BANDWIDTH_TOKENS, _BANDWIDTH_TARGET = SHAPES[0], 16, Target("fraction", 0.55, 0.75)
# What weights scaled in registers replace: with fewer tokens weights are no product's bottleneck, with more the same.
_WIDE_TOKENS, _DEQUANTIZED_TARGET = (128, 2048), Target("ratio", 1.0, None, "dequantized")
_ACT_ORDER_TARGET = Target("ratio", 1 / 1.10, 1.0, "in order")
_SCALED_MM_TARGET = Target("ratio", 0.95, 1.0, "quantize+scaled_mm")

# peer -> fewest and most tokens at which it is run; one that is far behind would take all the time
_TOKENS = {"dequantized": (128, 4096), "tinygemm": (1, 64), "checkpoint": (16, 128)}
_ON_CPU = ("torch", "dequantized")  # of the peers; the plain Triton kernel where Triton's interpreter runs it


@dataclass(frozen=True)
class Series:
    """One form of weights at several shapes and batch sizes; `name` without spaces."""

    group: str
    name: str
    form: Form
    peers: tuple[str, ...]
    shapes: Sequence[Shape]
    num_tokens: Sequence[int]
    dtype: torch.dtype = torch.bfloat16
    targets: Callable[[Form, Shape, int], tuple[Target, ...]] = lambda form, shape, num_tokens: ()


def dense_targets(form: Form, shape: Shape, num_tokens: int) -> tuple[Target, ...]:
    """Returns the targets of 4-bit weights against torch's dense product; by the size of the quantized weight."""
    large = form.num_bytes(*shape) >= _LARGE_WEIGHT_BYTES
    must: float | None
    stretch: float | None
    if num_tokens >= _MANY:
        must, stretch = _LARGE_MANY if large else (_SMALL_MANY_MUST, None)
    elif large:
        must, stretch = _LARGE.get(num_tokens, (None, None))
    else:
        must, stretch = _SMALL_MUST.get(num_tokens), None
    targets: tuple[Target, ...] = ()
    if must is not None:
        targets += (Target("ratio", must, stretch, "torch"),)
    if _WIDE_TOKENS[0] <= num_tokens <= _WIDE_TOKENS[1]:
        targets += (_DEQUANTIZED_TARGET,)
    if shape == _BANDWIDTH_SHAPE and num_tokens <= _BANDWIDTH_TOKENS:
        targets += (_BANDWIDTH_TARGET,)
    return targets


def _always(*targets: Target) -> Callable[[Form, Shape, int], tuple[Target, ...]]:
    return lambda form, shape, num_tokens: targets


_SERIES = (
    Series(
        "w4a16", "awq", Grouped(), ("torch", "dequantized", "tinygemm", "marlin", "machete", "gemlite", "checkpoint"),
        SHAPES, NUM_TOKENS, targets=dense_targets,
    ),
    Series(
        "w4a16", "gptq", Grouped(offsets="symmetric"), ("torch", "dequantized", "tinygemm", "marlin", "machete"),
        SHAPES, FEWER_TOKENS, targets=dense_targets,
    ),
    Series("fp8", "channels", Fp8(False), ("torch", "scaled_mm"), SHAPES[:4], ONE_BYTE_TOKENS,
           targets=_always(_SCALED_MM_TARGET)),
    Series("w4a16", "awq-fp16", Grouped(), ("torch", "marlin", "machete"), FEW_SHAPES, FEWER_TOKENS,
           torch.float16, dense_targets),
    Series("w4a16", "gptq-fp16", Grouped(offsets="symmetric"), ("torch", "marlin", "machete"), FEW_SHAPES,
           FEWER_TOKENS, torch.float16, dense_targets),
    Series("w4a16", "q4_1", Grouped(group_size=32, offsets="minimums"), ("torch", "tinygemm"), FEW_SHAPES,
           FEWER_TOKENS),
    Series("w4a16", "act-order", Grouped(offsets="symmetric", permuted=True), ("torch", "in order", "marlin"),
           FEW_SHAPES, FEW_TOKENS, targets=_always(_ACT_ORDER_TARGET)),
    Series("fp8", "blocks", Fp8(True), ("torch", "scaled_mm"), SHAPES[:4], ONE_BYTE_TOKENS,
           targets=_always(_SCALED_MM_TARGET)),
    Series("w8a16", "gptq", Grouped(8, offsets="symmetric"), ("torch", "marlin", "machete"), SHAPES[:4],
           ONE_BYTE_TOKENS),
    Series("int8", "channels", Int8(), ("torch", "int_mm"), SHAPES[:4], ONE_BYTE_TOKENS),
)  # fmt: skip
GROUPS = ("w4a16", "fp8", "w8a16", "int8")


def series(groups: Sequence[str], small: bool) -> list[Series]:
    """Returns the series of these groups, the most valuable first."""
    chosen = [one for one in _SERIES if one.group in groups]
    return [_small(one) for one in chosen] if small else chosen


def w4_cases(device: torch.device, small: bool, peers: tuple[str, ...] = W4_PEERS) -> Iterator[Case]:
    """Yields AWQ's products at three shapes, beside Marlin."""
    one = replace(_SERIES[0], peers=peers, shapes=W4_SHAPES, num_tokens=W4_TOKENS)
    one = _small(one) if small else one
    return (case for shape in one.shapes for case in cases(one, shape, device))


def _small(one: Series) -> Series:
    tiny = replace(one, shapes=SMALL_SHAPES, num_tokens=SMALL_TOKENS)
    # Triton's interpreter multiplies no bf16.
    return replace(tiny, dtype=torch.float16) if _interpreted() else tiny


def cases(one: Series, shape: Shape, device: torch.device) -> Iterator[Case]:
    """Yields a case per batch size; the weight is freed after the last."""
    weights = Weights(one.form, *shape, one.dtype, device)
    in_order = None
    if isinstance(one.form, Grouped) and "in order" in one.peers:
        in_order = Weights(Grouped(one.form.bits, one.form.group_size, one.form.offsets), *shape, one.dtype, device)
    try:
        for num_tokens in one.num_tokens:
            moved = num_tokens * (weights.num_inputs + weights.num_outputs) * one.dtype.itemsize
            yield Case(
                one.group,
                f"{one.name} {weights} M={num_tokens}",
                one.form.num_bytes(*shape) + moved,
                partial(_build, one, weights, in_order, num_tokens),
                2 * num_tokens * weights.num_outputs * weights.num_inputs,
                one.targets(one.form, shape, num_tokens),
                one.form.rate,
                {"series": one.name, "shape": str(weights), "num_tokens": num_tokens},
            )
    finally:
        for used in (weights, in_order):
            if used is not None:
                used.free()


def _build(one: Series, weights: Weights, in_order: Weights | None, num_tokens: int) -> Built:
    x = weights.random_input(num_tokens)
    expected = one.form.expected(x, weights.weight)
    built = Built({OURS: contestant([partial(packed, x, None) for packed in weights.packed], expected,
                                    one.form.tolerance)})  # fmt: skip
    if weights.device.type == "cuda" and one.group == "w4a16":
        built.contestants[IN_TURN] = in_turn(built.contestants[OURS].calls)
    if in_order is not None:
        built.contestants["in order"] = Contestant([partial(packed, x, None) for packed in in_order.packed], None)
    for name in one.peers:
        first, last = _TOKENS.get(name, (1, num_tokens))
        if name not in PEERS or not first <= num_tokens <= last or not _runs_on(weights.device, name):
            continue
        try:
            built.contestants |= PEERS[name](weights, x, expected)
        # Also what a peer raises when it refuses a shape; that it is missing is printed.
        except Exception as reason:
            built.notes.append(f"{name} for {one.group} {one.name}: {first_line(reason)}")
    return built


def _runs_on(device: torch.device, peer: str) -> bool:
    return device.type == "cuda" or peer in _ON_CPU or (peer == "checkpoint" and _interpreted())


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _selects(first: int, last: float) -> Callable[[Measured], bool]:
    """4-bit weights at so many tokens."""

    def selects(measured: Measured) -> bool:
        if measured.group != "w4a16":
            return False
        num_tokens = measured.facts["num_tokens"]
        assert isinstance(num_tokens, int)
        return first <= num_tokens <= last

    return selects


def _mean(peer: str, first: int, last: float, must: float, stretch: float | None = None) -> MeanTarget:
    tokens = f"M={first}" if first == last else f"M={first} to {last}"
    return MeanTarget(f"w4a16 {tokens}", peer, must, stretch, _selects(first, last))


MEAN_TARGETS = (
    _mean("marlin", 1, 64, 0.90, 1.0),
    _mean("machete", 64, max(NUM_TOKENS), 0.85),
    _mean("gemlite", 1, 1, 1.0),
    _mean("gemlite", 2, 64, 1.25),
    _mean("tinygemm", 1, 1, 1.0),
    _mean("tinygemm", 8, 64, 1.5),
    _mean("checkpoint", 16, 128, 3.0),
)
W4_MEAN_TARGETS = [
    *(target for target in MEAN_TARGETS if target.peer in W4_PEERS),
    *(replace(target, ours=IN_TURN) for target in MEAN_TARGETS if target.peer in W4_PEERS),
]
