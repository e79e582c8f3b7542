"""Compares the CPU kernels with torch: `python -m benchmarks.kernels_cpu [--threads N] [PART ...]`.

All contenders of a row run in turn within one loop and the best round counts, so the ratios hold on a busy machine too.
Weights and pages are cold: each call takes the next of many copies. Shapes are those of SmolLM2-135M in bfloat16, and
products also those of Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import ops, reference
from pagewire.kernels.cpu import attention, recording
from pagewire.kernels.cpu.inputs import step_inputs
from pagewire.kernels.cpu.products import packed_linear
from pagewire.kernels.cpu.products.linear import linear
from pagewire.tools.bench.curves import machine

COLD_BYTES = 100_000_000  # more than the caches hold
MOST_WORK = 1_000_000_000  # multiply-adds of a round, unless that were fewer than two calls
ROUNDS = 6
SMOL_SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
QWEN_SHAPES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
SCALE = HEAD_DIM**-0.5
# Slots, tokens, rank
ADAPTERS = (
    *((slots, tokens, rank) for rank in (8, 16, 64) for tokens in (8, 32) for slots in (1, 8, 32)),
    (1, 1, 16),
    (1, 512, 16),
)


def best_times(contenders: dict[str, Callable[[], None]], calls: int) -> dict[str, float]:
    """Seconds per call of each contender, each of which makes `calls` calls; the best of ROUNDS.

    With one thread it is CPU time, which other work on the machine disturbs less.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            started = clock()
            run()
            best[name] = min(best[name], (clock() - started) / calls)
    return best


def repeated(call: Callable[[], object], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            call()

    return run


def for_each(weights: list[Any], call: Callable[[Any], object]) -> Callable[[], None]:
    def run() -> None:
        for weight in weights:
            call(weight)

    return run


def print_row(label: str, times: dict[str, float], work: str) -> None:
    """The factor is that of "ours" over the fastest of the others; "ours, ..." is ours as well."""
    columns = "  ".join(f"{name} {seconds * 1e6:9.1f}" for name, seconds in times.items())
    fastest_other = min(seconds for name, seconds in times.items() if not name.startswith("ours"))
    print(f"{label:24} {columns}  x{fastest_other / times['ours']:.2f}  {work}", flush=True)


def bench_linear() -> None:
    print("\nlinear, µs (direct: with row-major weights; prepacked: oneDNN with its own copy of the weights)")
    for in_features, out_features in (*SMOL_SHAPES, *QWEN_SHAPES):
        weight_bytes = 2 * in_features * out_features
        copies = max(2, COLD_BYTES // weight_bytes)
        weights = [torch.randn(out_features, in_features).bfloat16() for _ in range(copies)]
        is_fixed = packed_linear.packs_fixed_point()
        packed = [packed_linear.pack(weight.clone(), fixed_point=is_fixed) for weight in weights]
        for num_tokens in (1, 2, 4, 8, 16, 32, 64, 256, 2048):
            calls = max(2, min(copies, MOST_WORK // (num_tokens * in_features * out_features)))
            times = best_times(linear_contenders(packed[:calls], weights[:calls], num_tokens), calls)
            rate = weight_bytes / times["ours"] / 1e9
            flops = 2 * num_tokens * in_features * out_features / times["ours"] / 1e9
            work = f"{rate:.0f} GB/s {flops:.0f} GFLOP/s"
            print_row(f"{in_features}->{out_features} T={num_tokens}", times, work)


def linear_contenders(packed: list[Tensor], weights: list[Tensor], num_tokens: int) -> dict[str, Callable[[], None]]:
    out_features, in_features = weights[0].shape
    x = torch.randn(num_tokens, in_features).bfloat16()
    given = x if packed_linear.rounds_inputs() else x.float()  # as norms give it
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens) for weight in weights]
    contenders = {
        "ours": for_each(packed, lambda weight: packed_linear.packed_linear(given, weight, None, out_features)),
        "F.linear": for_each(weights, lambda weight: F.linear(x, weight)),
        "prepacked": for_each(
            reordered, lambda weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        ),
    }
    if num_tokens <= 32:
        contenders["ours, direct"] = for_each(weights, lambda weight: linear(x, weight, None))
    return contenders


def bench_linear_fp32() -> None:
    print("\nlinear in fp32, µs")
    for in_features, out_features in ((384, 384), (384, 1536), (1536, 384), (576, 960), (1536, 576)):
        weights = [torch.randn(out_features, in_features) for _ in range(8)]
        for num_tokens in (17, 64, 512, 2048):
            x = torch.randn(num_tokens, in_features)
            calls = max(1, min(8, MOST_WORK // (num_tokens * in_features * out_features)))
            contenders = {
                "ours": for_each(weights[:calls], partial(linear, x, bias=None)),
                "F.linear": for_each(weights[:calls], partial(F.linear, x)),
            }
            times = best_times(contenders, calls)
            flops = 2 * num_tokens * in_features * out_features / times["ours"] / 1e9
            print_row(f"{in_features}->{out_features} T={num_tokens}", times, f"{flops:.0f} GFLOP/s")


def bench_adapters() -> None:
    print("\nadapters in all projections of 30 layers, µs per step (ours: recorded; F.linear: slot by slot, in bf16)")
    for num_slots, num_tokens, rank in ADAPTERS:
        tokens = torch.arange(num_tokens, dtype=torch.int32) % num_slots
        first = list(adapted_products(rank, num_slots, tokens))  # activations are in the cache, weights are not
        layers = [first, *(adapted_products(rank, num_slots, tokens) for _ in range(29))]
        products = [(*own[:2], *args[2:]) for layer in layers for own, args in zip(first, layer, strict=True)]

        def ours(products: list[tuple[Tensor, ...]] = products) -> Tensor:
            for args in products:
                ops.add_adapters(*args)
            return products[0][0]

        recorded = recording.record(ours, recording.Memory())
        contenders = {"ours": recorded.replay, "F.linear": for_each(products, add_slot_by_slot)}
        times = best_times(contenders, 1)
        size = sum(down.numel() + up.numel() for _, _, down, up, *_ in products)
        one = size // num_slots  # numbers of an adapter
        rate, flops = (times["ours"] * 1e9 / (2 * one * count) for count in (min(num_slots, num_tokens), num_tokens))
        print_row(f"{num_slots} of {rank}, T={num_tokens}", times, f"{1 / rate:.0f} GB/s {1 / flops:.0f} GFLOP/s")


def adapted_products(rank: int, num_slots: int, tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the arguments of `add_adapters` in a layer of SmolLM2-135M, as the model's layers give them."""
    dtype = torch.bfloat16 if packed_linear.rounds_inputs() else torch.float32
    for inputs, outputs in ((576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,))):
        starts = torch.tensor([0, *itertools.accumulate(outputs)], dtype=torch.int32)
        yield (
            torch.zeros(len(tokens), sum(outputs)),
            torch.randn(len(tokens), inputs).to(dtype),
            torch.randn(num_slots, len(outputs), rank, inputs).bfloat16(),
            torch.randn(num_slots, rank, sum(outputs)).bfloat16(),
            tokens,
            starts,
            torch.full((num_slots, len(outputs)), rank, dtype=torch.int32),
        )


def add_slot_by_slot(args: tuple[Tensor, ...]) -> None:
    out, x, down, up, slots, starts, _ = args
    bounds = starts.tolist()
    for slot in range(len(down)):
        tokens = (slots == slot).nonzero().flatten()
        low = F.linear(x[tokens].bfloat16(), down[slot].flatten(0, 1)).view(len(tokens), *down.shape[1:3])
        for part, (start, stop) in enumerate(itertools.pairwise(bounds)):
            out[tokens, start:stop] += low[:, part] @ up[slot, :, start:stop]


def bench_decode() -> None:
    print("\ndecode attention, µs (fp8: pages of half the size; sdpa: contiguous keys, heads of a group as query rows)")
    for num_reqs, seq_len in (*itertools.product((1, 8, 32, 64), (129, 1024)), (1, 8192)):
        kv_bytes = num_reqs * seq_len * NUM_KV_HEADS * HEAD_DIM * 4
        times = best_times(*decode_contenders(num_reqs, seq_len, max(2, COLD_BYTES // kv_bytes)))
        print_row(f"B={num_reqs} S={seq_len}", times, f"{kv_bytes / times['ours'] / 1e9:.0f} GB/s")


def decode_contenders(num_reqs: int, seq_len: int, copies: int) -> tuple[dict[str, Callable[[], None]], int]:
    copies = min(copies, 30)
    num_pages = -(-seq_len // BLOCK_SIZE)
    page_shape = (num_reqs * num_pages, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = [torch.randn(page_shape).bfloat16() for _ in range(copies)]
    fp8_caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    kv_scales = torch.ones(2, NUM_KV_HEADS)
    contiguous = [torch.randn(2, num_reqs, NUM_KV_HEADS, seq_len, HEAD_DIM).bfloat16() for _ in range(copies)]
    block_table = torch.randperm(num_reqs * num_pages).reshape(num_reqs, num_pages).int()
    query = torch.randn(num_reqs, NUM_HEADS, HEAD_DIM).bfloat16()
    starts = torch.arange(num_reqs + 1, dtype=torch.int32)
    seq_lens = torch.full((num_reqs,), seq_len, dtype=torch.int32)
    folded = query.view(num_reqs, NUM_KV_HEADS, -1, HEAD_DIM)

    def ours() -> None:
        for kv_cache in caches:
            attention.paged_attention(
                query, kv_cache, block_table, starts, seq_lens, 1, 1, SCALE, 0, 0.0, None, None, 0, None
            )

    def fp8() -> None:
        for kv_cache in fp8_caches:
            attention.paged_attention(
                query, kv_cache, block_table, starts, seq_lens, 1, 1, SCALE, 0, 0.0, kv_scales, None, 0, None
            )

    def sdpa() -> None:
        for key, value in contiguous:
            F.scaled_dot_product_attention(folded, key, value, scale=SCALE)

    return {"ours": ours, "ours, fp8": fp8, "sdpa": sdpa}, copies


def bench_prefill() -> None:
    print("\ncausal prefill of one prompt's last Q tokens, µs (sdpa: contiguous keys, already repeated per head)")
    for query_len, seq_len in ((256, 256), (1024, 1024), (2048, 2048), (256, 2048)):
        for dtype in (torch.bfloat16, torch.float32):
            times = best_times(prefill_contenders(query_len, seq_len, dtype), 1)
            flops = 2 * NUM_HEADS * HEAD_DIM * query_len * (2 * seq_len - query_len + 1)
            label = f"Q={query_len} S={seq_len} {str(dtype).removeprefix('torch.')}"
            print_row(label, times, f"{flops / times['ours'] / 1e9:.0f} GFLOP/s")


def prefill_contenders(query_len: int, seq_len: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    num_pages = seq_len // BLOCK_SIZE
    kv_cache = torch.randn(num_pages, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
    block_table = torch.randperm(num_pages).reshape(1, num_pages).int()
    query = torch.randn(query_len, NUM_HEADS, HEAD_DIM).to(dtype)
    starts = torch.tensor([0, query_len], dtype=torch.int32)
    seq_lens = torch.tensor([seq_len], dtype=torch.int32)
    key, value = torch.randn(2, 1, NUM_HEADS, seq_len, HEAD_DIM).to(dtype)
    heads_first = query.transpose(0, 1)[None].contiguous()
    mask = None if query_len == seq_len else reference.visible(query_len, seq_len, 0, query.device)

    def ours() -> None:
        attention.paged_attention(
            query, kv_cache, block_table, starts, seq_lens, query_len, query_len, SCALE, 0, 0.0, None, None, 0, None
        )

    def sdpa() -> None:
        F.scaled_dot_product_attention(heads_first, key, value, mask, is_causal=mask is None, scale=SCALE)

    return {"ours": ours, "sdpa": sdpa}


def bench_rotary_store_kv() -> None:
    print("\nrotary_store_kv, µs without torch's dispatch (fp8: into fp8 pages; torch: the reference)")
    for num_tokens, calls in ((1, 200), (32, 100), (2048, 5)):
        for norm in (False, True):
            times = best_times(rotary_contenders(num_tokens, norm, calls), calls)
            kv_bytes = 2 * 2 * num_tokens * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM  # read and written
            work = f"{kv_bytes / times['ours'] / 1e9:.1f} GB/s"
            print_row(f"T={num_tokens}{' q/k norm' if norm else ''}", times, work)


def rotary_contenders(num_tokens: int, norm: bool, calls: int) -> dict[str, Callable[[], None]]:
    qkv = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).bfloat16()
    positions = torch.arange(num_tokens)
    cos_sin = torch.randn(num_tokens, HEAD_DIM)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:num_tokens]
    cache = torch.zeros(num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).bfloat16()
    fp8_cache, kv_scales = cache.to(torch.float8_e4m3fn), torch.full((2, NUM_KV_HEADS), 0.05)
    weight = torch.ones(HEAD_DIM).bfloat16() if norm else None
    inputs, norms = (positions, qkv, cos_sin), (weight, weight, 1e-5)
    return {
        "ours": repeated(lambda: attention.rotary_store_kv(*inputs, cache, slots, *norms, None), calls),
        "ours, fp8": repeated(lambda: attention.rotary_store_kv(*inputs, fp8_cache, slots, *norms, kv_scales), calls),
        "torch": repeated(lambda: reference.rotary_store_kv(*inputs, cache, slots, *norms, None), calls),
    }


def bench_step_inputs() -> None:
    print("\nstep_inputs of decoding requests with 1024 tokens, µs without torch's dispatch (torch: the reference)")
    for num_reqs in (1, 32, 256):
        calls = max(2, 64 // num_reqs)
        print_row(f"B={num_reqs}", best_times(step_contenders(num_reqs, calls), calls), "")


def step_contenders(num_reqs: int, calls: int) -> dict[str, Callable[[], None]]:
    seq_len, max_model_len = 1024, 2048
    starts = torch.arange(num_reqs + 1, dtype=torch.int32)
    rows = torch.randperm(num_reqs).int()
    num_blocks = torch.full((num_reqs, 1), max_model_len // BLOCK_SIZE, dtype=torch.int32)
    no_blocks = torch.zeros(num_reqs + 1, dtype=torch.int32)
    token_ids = torch.zeros(num_reqs, max_model_len, dtype=torch.int32)
    num_computed = torch.full((num_reqs,), seq_len)
    tables = torch.zeros(2, 1, num_reqs, max_model_len // BLOCK_SIZE, dtype=torch.int32)
    per_token = (*torch.zeros(2, num_reqs, dtype=torch.int64), torch.zeros(1, num_reqs, dtype=torch.int64))
    seq_lens = torch.zeros(num_reqs, dtype=torch.int32)
    read = (rows, starts, num_blocks, no_blocks, no_blocks[:0], token_ids, num_computed, tables[0])

    def contender(implementation: Callable[..., None]) -> Callable[[], None]:
        def step() -> None:
            implementation(*read, *per_token, seq_lens, tables[1], BLOCK_SIZE)

        def run() -> None:
            num_computed.fill_(seq_len)  # the rows move on
            repeated(step, calls)()

        return run

    return {"ours": contender(step_inputs), "torch": contender(reference.step_inputs)}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU kernels against their torch equivalents")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parts = {name.removeprefix("bench_"): part for name, part in globals().items() if name.startswith("bench_")}
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*parts, []], help=f"of {', '.join(parts)}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(machine())
    print(f"torch {torch.__version__}, {arguments.threads} threads, bfloat16 unless said otherwise; best of {ROUNDS}")
    for part in arguments.parts or parts:
        parts[part]()


if __name__ == "__main__":
    main()
