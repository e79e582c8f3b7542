"""Paged attention: decode, verification of speculated tokens, prefill and extend."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.cases.attention_inputs import (
    FP8,
    TOLERANCE,
    AttentionInputs,
    AttentionShape,
    Features,
    error,
    make_inputs,
)
from benchmarks.gpu.cases.case import IN_TURN, OURS, Built, Case, Contestant, Target, in_turn
from benchmarks.gpu.measure import Call
from benchmarks.gpu.peer_kernels import attention as peers
from benchmarks.kernels.search import forced
from pagewire.kernels import tuning

# requests x tokens of context, and what is asked of ours: microseconds, or a share of the copy bandwidth
DECODE_TARGETS = {
    (1, 1024): Target("us", 8.0, 5.0),
    (1, 8192): Target("fraction", 0.50, 0.65),
    (8, 1024): Target("fraction", 0.50, 0.65),
    (1, 32768): Target("fraction", 0.75, 0.85),
    (16, 4096): Target("fraction", 0.85, 0.92),
    (64, 1024): Target("fraction", 0.85, 0.92),
    (64, 4096): Target("fraction", 0.90, 0.96),
    (256, 1024): Target("fraction", 0.90, 0.96),
}
RAGGED_TARGET = Target("fraction", 0.85, 0.93)
# In no case slower than this; over all cases see `benchmarks.gpu.kernels.MEAN_TARGETS`.
PEER_TARGETS = (Target("ratio", 0.85, 1.05, "fa3"),)
FP8_TARGET = Target("ratio", 1.6, 1.85, "bf16 KV")
VERIFY_TARGET = Target("ratio", 1 / 1.10, 1.0, "q_len 1")
PREFILL_TARGETS = (Target("tflops", 400.0, 500.0), Target("ratio", 0.60, 0.75, "fa3"))
DESCRIPTOR_TARGETS = (Target("ratio", 1.0, 1.3, "plain"),)
SHORT_PREFILL_TARGETS = (Target("ratio", 0.95, 1.0, "fa3"),)
FIXED_SPLIT = 256
MODEL_LAYERS = 32  # of Llama-3.1-8B: pages of one layer are 2 MiB apart
# As an executor chooses by itself on sm_90.
PREFILL_BLOCK_SIZE = 64

LLAMA_HEADS, QWEN_HEADS, SMALL_HEADS = (32, 8, 128), (28, 4, 128), (14, 2, 64)


def decode_cases(device: torch.device, small: bool) -> Iterator[Case]:
    """Yields the most important ones first: a run may have time for no more."""
    if small:
        shape = AttentionShape(4, 2, 64, 16, [1] * 3, [40] * 3, torch.float32, torch.float32)
        yield _decode(shape, "3 x 40", (), device)
        yield _decode(replace(shape, layers=2), "3 x 40, 2 layers", (), device)
        yield _verify(shape, 4, device)
        yield _fp8(replace(shape, kv_dtype=FP8), device)
        yield _fixed_split(replace(shape, seq_lens=[40, 9, 70]), device)
        return
    yield from _decode_targets(LLAMA_HEADS, 16, device)
    pages = AttentionShape(*LLAMA_HEADS, 16, [1] * 64, [1024] * 64, layers=MODEL_LAYERS)
    yield _decode(pages, f"64 x 1024, {MODEL_LAYERS} layers", PEER_TARGETS, device)
    yield from _decode_targets(QWEN_HEADS, 16, device)
    for num_reqs, seq_len in ((64, 1024), (64, 4096), (256, 1024)):
        yield _fp8(AttentionShape(*LLAMA_HEADS, 16, [1] * num_reqs, [seq_len] * num_reqs, kv_dtype=FP8), device)
    for query_len in (4, 8):
        yield _verify(AttentionShape(*LLAMA_HEADS, 16, [1] * 64, [1024] * 64), query_len, device)
    yield _fixed_split(AttentionShape(*LLAMA_HEADS, 16, [1] * 64, [1024 - 5 * n for n in range(64)]), device)
    for heads, block_size in ((LLAMA_HEADS, 64), (SMALL_HEADS, 16), (QWEN_HEADS, 64), (SMALL_HEADS, 64)):
        yield from _decode_targets(heads, block_size, device)


def _decode_targets(heads: tuple[int, int, int], block_size: int, device: torch.device) -> Iterator[Case]:
    for (num_reqs, seq_len), target in DECODE_TARGETS.items():
        shape = AttentionShape(*heads, block_size, [1] * num_reqs, [seq_len] * num_reqs)
        targets = (target, *PEER_TARGETS) if heads != SMALL_HEADS else PEER_TARGETS
        yield _decode(shape, f"{num_reqs} x {seq_len}", targets, device)
    ragged = AttentionShape(*heads, block_size, [1] * 256, random.Random(0).choices(range(128, 4097), k=256))
    yield _decode(ragged, "256 x 128-4096", (RAGGED_TARGET, *PEER_TARGETS), device)


def _decode(shape: AttentionShape, label: str, targets: tuple[Target, ...], device: torch.device) -> Case:
    return _case("decode", label, shape, targets, device, ["sdpa"] * shape.uniform + ["fa3"])


def prefill_cases(device: torch.device, small: bool) -> Iterator[Case]:
    dtype = torch.float32 if small else torch.bfloat16
    heads = (4, 2, 64) if small else LLAMA_HEADS

    def prefill(
        query_lens: list[int],
        seq_lens: list[int],
        label: str,
        targets: tuple[Target, ...],
        *peers: str,
        page: int = 16 if small else PREFILL_BLOCK_SIZE,
    ) -> Case:
        shape = AttentionShape(*heads, page, query_lens, seq_lens, dtype, dtype)
        return _case("prefill", label, shape, targets, device, list(peers))

    if small:
        yield prefill([70], [70], "70", (), "sdpa")
        yield prefill([20, 33], [50, 33], "20 behind 30, 33", ())
        return
    for page in (64, 16):
        yield prefill([4096], [4096], "4096", PREFILL_TARGETS, "sdpa", "fa3", page=page)
    yield prefill([1024], [1024], "1024", SHORT_PREFILL_TARGETS, "sdpa", "fa3")
    yield _descriptors(AttentionShape(*LLAMA_HEADS, 64, [4096], [4096]), device)
    for page in (64, 16):
        yield prefill([512], [8704], "512 behind 8192", PREFILL_TARGETS, "fa3", page=page)
        yield prefill([16384], [16384], "16384", PREFILL_TARGETS, "sdpa", "fa3", page=page)
    mixed = [2048, 1024, 1536, 512, 1800, 700, 300, 272]
    yield prefill(mixed, mixed, "8 x 272-2048", (), "fa3")


def _name(shape: AttentionShape, label: str) -> str:
    return f"{shape.num_heads}/{shape.num_kv_heads}/{shape.head_dim} p{shape.block_size} {label}"


def _case(
    group: str,
    label: str,
    shape: AttentionShape,
    targets: tuple[Target, ...],
    device: torch.device,
    peer_names: list[str],
) -> Case:
    def built() -> Built:
        inputs = make_inputs(shape, device)
        result = Built({OURS: _ours(inputs)})
        if group == "decode":
            calls: list[Call] = [partial(inputs.call_with_plan, index) for index in range(len(inputs.queries))]
            result.contestants["with its plan"] = Contestant(calls, None)
            if device.type == "cuda":
                result.contestants[IN_TURN] = in_turn(result.contestants[OURS].calls)
        for name in peer_names if device.type == "cuda" else [name for name in peer_names if name == "sdpa"]:
            try:
                result.contestants[name] = peers.PEERS[name](inputs)
            # Also what a peer raises when it refuses a shape; that it is missing is printed.
            except Exception as reason:
                result.notes.append(f"{name}: {(str(reason).strip() or repr(reason)).splitlines()[0]}")
        return result

    num_flops = shape.num_flops if group == "prefill" else 0  # decode is bound by bytes
    return Case(group, _name(shape, label), shape.num_bytes, built, num_flops, targets)


def _ours(inputs: AttentionInputs) -> Contestant:
    calls: list[Call] = [partial(inputs.call, index) for index in range(len(inputs.queries))]

    def checked() -> float:
        # What is freed here is what the output will be allocated from: an element that is never written shows as NaN.
        torch.full_like(inputs.queries[0], torch.nan)
        return error(inputs.call(0), inputs)

    return Contestant(calls, checked, TOLERANCE)


def _fp8(shape: AttentionShape, device: torch.device) -> Case:
    """Against our own kernel over a cache of the query's dtype."""

    def built() -> Built:
        wide = replace(shape, kv_dtype=shape.dtype)
        return Built({OURS: _ours(make_inputs(shape, device)), "bf16 KV": _ours(make_inputs(wide, device))})

    label = f"{len(shape.seq_lens)} x {shape.seq_lens[0]} fp8 KV"
    return Case("decode", _name(shape, label), shape.num_bytes, built, 0, (FP8_TARGET,))


def _verify(single: AttentionShape, query_len: int, device: torch.device) -> Case:
    """Several query tokens per request, against one over the same pages."""
    shape = replace(single, query_lens=[query_len] * len(single.seq_lens))

    def built() -> Built:
        return Built({OURS: _ours(make_inputs(shape, device)), "q_len 1": _ours(make_inputs(single, device))})

    label = f"{len(shape.seq_lens)} x {shape.seq_lens[0]} q_len {query_len}"
    return Case("decode", _name(shape, label), shape.num_bytes, built, 0, (VERIFY_TARGET,))


def _descriptors(shape: AttentionShape, device: torch.device) -> Case:
    """One prompt, compared with our own kernel that reads pages by addresses."""
    query_len, group = shape.query_lens[0], shape.num_heads // shape.num_kv_heads
    config = tuning.lookup(
        "prefill_attention", tuning.capability_of(device), head_dim=shape.head_dim, kv_bytes=shape.kv_dtype.itemsize,
        block_size=shape.block_size, group=group, batch=1, query_len=query_len,
    )  # fmt: skip

    def built() -> Built:
        inputs = make_inputs(shape, device)
        ours = _ours(inputs)
        plain = dict(config) | {"descriptors": 0, "num_warps": 8}
        calls: list[Call] = [partial(_call_forced, plain, call) for call in ours.calls]
        return Built({OURS: ours, "plain": Contestant(calls, None)})

    name = _name(shape, f"{query_len} descriptors")
    return Case("prefill", name, shape.num_bytes, built, shape.num_flops, DESCRIPTOR_TARGETS)


def _call_forced(config: Mapping[str, int], call: Call) -> None:
    with forced("prefill_attention", config):
        call()


def _fixed_split(shape: AttentionShape, device: torch.device) -> Case:
    """Fixed split size against free choice; a request alone must give the same bits as in the batch."""
    fixed_shape = replace(shape, features=Features(split_size=FIXED_SPLIT))

    def built() -> Built:
        inputs = make_inputs(fixed_shape, device)
        fixed = _ours(inputs)

        def checked() -> float:
            batch = inputs.call(0)
            same = torch.equal(batch[1:2], inputs.call_alone(1))
            return error(batch, inputs) if same else float("nan")

        free = _ours(make_inputs(shape, device))
        return Built({OURS: Contestant(fixed.calls, checked, TOLERANCE), "free split": free})

    label = f"{len(shape.seq_lens)} x {min(shape.seq_lens)}-{max(shape.seq_lens)} split {FIXED_SPLIT}"
    return Case("decode", _name(shape, label), shape.num_bytes, built)


def variant_cases(device: torch.device, small: bool) -> Iterator[Case]:
    """Yields the cases that only have to be correct: features, head and page sizes, dtypes, ragged mixes."""
    decode, prefill = ([1, 1, 8, 3, 1], [1, 70, 333, 3, 1025]), ([33, 1, 130, 200], [33, 501, 200, 200])
    features = {
        "window 50": Features(sliding_window=50),
        "soft cap 30": Features(soft_cap=30.0),
        "window 128, sinks": Features(sliding_window=128, sinks=True),
        "window, cap, split 64": Features(sliding_window=100, soft_cap=20.0, split_size=64),
    }
    if small:
        decode, prefill = ([1, 3], [40, 3]), ([5, 20], [5, 30])
    dtype = torch.float32 if small else torch.bfloat16

    def variant(shape: AttentionShape, label: str) -> Case:
        kind = "prefill" if max(shape.query_lens) > 16 else "short"
        return _case("variants", f"{kind} {label}", shape, (), device, [])

    for lens in (decode, prefill):
        for label, chosen in features.items():
            yield variant(AttentionShape(28, 4, 128, 16, *lens, dtype, dtype, chosen), label)
        for head_dim, block_size in ((64, 32), (80, 16), (96, 64), (192, 16), (256, 32)) if not small else ((80, 32),):
            yield variant(AttentionShape(16, 1, head_dim, block_size, *lens, dtype, dtype), "")
        yield variant(AttentionShape(9, 3, 64, 16, *lens, torch.float16, torch.float16), "fp16")
        yield variant(AttentionShape(8, 8, 128, 16, *lens, torch.float32, torch.float32), "fp32")
        yield variant(AttentionShape(32, 8, 128, 16, *lens, dtype, FP8), "fp8 KV")
