"""Time the CPU kernels against their torch equivalents: `python -m benchmarks.kernels_cpu [--threads N]`.

Every contender of a row runs in turn within one loop and the best round counts, so that the ratios mean something on
a machine that does other work as well. Weights and pages are cold: each call takes the next of many copies.
Shapes are those of SmolLM2-135M in bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import native

COLD_BYTES = 100_000_000  # more than the caches hold
ROUNDS = 6
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
SCALE = HEAD_DIM**-0.5


def best_times(contenders: dict[str, Callable[[], None]], calls: int) -> dict[str, float]:
    """Seconds per call of each contender, each of which makes `calls` calls; the best of ROUNDS."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - started) / calls)
    return best


def print_row(label: str, times: dict[str, float], ours: str, work: str) -> None:
    columns = "  ".join(f"{name} {seconds * 1e6:9.1f}" for name, seconds in times.items())
    fastest_other = min(seconds for name, seconds in times.items() if name != ours)
    print(f"{label:24} {columns}  x{fastest_other / times[ours]:.2f}  {work}", flush=True)


def bench_linear() -> None:
    print("\nlinear, µs (ours reads row-major weights; prepacked = oneDNN with its own copy of the weights)")
    for in_features, out_features in ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)):
        weight_bytes = 2 * in_features * out_features
        copies = max(2, COLD_BYTES // weight_bytes)
        weights = [torch.randn(out_features, in_features).bfloat16() for _ in range(copies)]
        for num_tokens in (1, 4, 8, 16, 32, 64, 256):
            times = best_times(linear_contenders(weights, num_tokens), copies)
            rate = weight_bytes / times["ours"] / 1e9
            flops = 2 * num_tokens * in_features * out_features / times["ours"] / 1e9
            work = f"{rate:.0f} GB/s {flops:.0f} GFLOP/s"
            print_row(f"{in_features}->{out_features} T={num_tokens}", times, "ours", work)


def linear_contenders(weights: list[Tensor], num_tokens: int) -> dict[str, Callable[[], None]]:
    x = torch.randn(num_tokens, weights[0].shape[1]).bfloat16()
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens) for weight in weights]

    def ours() -> None:
        for weight in weights:
            native.linear(x, weight, None)

    def torch_linear() -> None:
        for weight in weights:
            F.linear(x, weight)

    def prepacked() -> None:
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    return {"ours": ours, "F.linear": torch_linear, "prepacked": prepacked}


def bench_decode() -> None:
    print("\ndecode attention, µs (sdpa: contiguous keys, heads of a group folded into the query)")
    for num_reqs in (1, 8, 32):
        for seq_len in (512, 2048):
            kv_bytes = num_reqs * seq_len * NUM_KV_HEADS * HEAD_DIM * 4
            times = best_times(*decode_contenders(num_reqs, seq_len, max(2, COLD_BYTES // kv_bytes)))
            print_row(f"B={num_reqs} S={seq_len}", times, "ours", f"{kv_bytes / times['ours'] / 1e9:.0f} GB/s")


def decode_contenders(num_reqs: int, seq_len: int, copies: int) -> tuple[dict[str, Callable[[], None]], int]:
    copies = min(copies, 30)
    num_pages = seq_len // BLOCK_SIZE
    page_shape = (num_reqs * num_pages, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = [torch.randn(page_shape).bfloat16() for _ in range(copies)]
    contiguous = [torch.randn(2, num_reqs, NUM_KV_HEADS, seq_len, HEAD_DIM).bfloat16() for _ in range(copies)]
    block_table = torch.randperm(num_reqs * num_pages).reshape(num_reqs, num_pages).int()
    query = torch.randn(num_reqs, NUM_HEADS, HEAD_DIM).bfloat16()
    starts = torch.arange(num_reqs + 1, dtype=torch.int32)
    seq_lens = torch.full((num_reqs,), seq_len, dtype=torch.int32)
    folded = query.view(num_reqs, NUM_KV_HEADS, -1, HEAD_DIM)

    def ours() -> None:
        for kv_cache in caches:
            native.paged_attention(query, kv_cache, block_table, starts, seq_lens, 1, SCALE)

    def sdpa() -> None:
        for key, value in contiguous:
            F.scaled_dot_product_attention(folded, key, value, scale=SCALE)

    return {"ours": ours, "sdpa": sdpa}, copies


def bench_prefill() -> None:
    print("\ncausal prefill of one prompt, µs (sdpa: contiguous keys, already repeated per head)")
    for seq_len in (512, 2048):
        for dtype in (torch.bfloat16, torch.float32):
            times = best_times(prefill_contenders(seq_len, dtype), 1)
            flops = 2 * NUM_HEADS * HEAD_DIM * seq_len * (seq_len + 1)
            label = f"S={seq_len} {str(dtype).removeprefix('torch.')}"
            print_row(label, times, "ours", f"{flops / times['ours'] / 1e9:.0f} GFLOP/s")


def prefill_contenders(seq_len: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    num_pages = seq_len // BLOCK_SIZE
    kv_cache = torch.randn(num_pages, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
    block_table = torch.randperm(num_pages).reshape(1, num_pages).int()
    query = torch.randn(seq_len, NUM_HEADS, HEAD_DIM).to(dtype)
    starts = torch.tensor([0, seq_len], dtype=torch.int32)
    seq_lens = torch.tensor([seq_len], dtype=torch.int32)
    key, value = torch.randn(2, 1, NUM_HEADS, seq_len, HEAD_DIM).to(dtype)
    heads_first = query.transpose(0, 1)[None].contiguous()

    def ours() -> None:
        native.paged_attention(query, kv_cache, block_table, starts, seq_lens, seq_len, SCALE)

    def sdpa() -> None:
        F.scaled_dot_product_attention(heads_first, key, value, is_causal=True, scale=SCALE)

    return {"ours": ours, "sdpa": sdpa}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU kernels against their torch equivalents")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {threads} threads, bfloat16 unless said otherwise; best of {ROUNDS}")
    bench_linear()
    bench_decode()
    bench_prefill()


if __name__ == "__main__":
    main()
