"""Norm, RoPE with KV write, SiLU·mul and the step's inputs, at prefill sizes (>= 64 MB moved) and at decode sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cases.case import IN_TURN, OURS, Built, Case, Contestant, Target, in_turn
from benchmarks.gpu.measure import MAX_GRAPH_CALLS, MAX_SETS, Call, num_sets, relative_error
from pagewire.kernels import ops, reference

PREFILL_TARGET = Target("fraction", 0.85, 0.95)
HIDDEN, INTERMEDIATE = 4096, 14336
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
MAX_POSITION = 8192
DECODE_SIZES = (1, 64, 256)
EPS = 1e-5


def cases(device: torch.device, small: bool) -> Iterator[Case]:
    return (replace(case, build=partial(_also_in_turn, case, device)) for case in _cases(device, small))


def _also_in_turn(case: Case, device: torch.device) -> Built:
    built = case.build()
    if device.type == "cuda":
        built.contestants[IN_TURN] = in_turn(built.contestants[OURS].calls)
    return built


def _cases(device: torch.device, small: bool) -> Iterator[Case]:
    dtype = torch.float32 if small else torch.bfloat16
    for num_tokens in (3,) if small else (*DECODE_SIZES, 4096):
        targets = (PREFILL_TARGET,) if num_tokens == 4096 else ()
        yield _norm(num_tokens, HIDDEN if not small else 64, dtype, device, targets)
        yield _gated("silu_and_mul", num_tokens, INTERMEDIATE if not small else 96, dtype, device, targets)
        for variant in ("", "q/k norm", "fp8"):
            yield _rotary(num_tokens, variant, dtype, device, targets)
    yield _gated("gelu_tanh_and_mul", 3 if small else 4096, 96 if small else 9728, dtype, device, ())
    yield _norm(3 if small else 4096, 72 if small else 896, torch.float32 if small else torch.float16, device, ())


def _norm(num_tokens: int, size: int, dtype: torch.dtype, device: torch.device, targets: tuple[Target, ...]) -> Case:
    num_bytes = 4 * num_tokens * size * dtype.itemsize  # x and residual in, residual and result out

    def build() -> Built:
        sets = num_sets(num_bytes, device)
        x, residual = torch.randn(2, sets, num_tokens, size, dtype=dtype, device=device)
        weight = torch.randn(size, dtype=dtype, device=device)

        def error() -> float:
            ours, expected = residual[0].clone(), residual[0].clone()
            out, expected_out = (
                ops.add_rms_norm(x[0], ours, weight, EPS, None),
                reference.add_rms_norm(x[0], expected, weight, EPS),
            )
            return max(relative_error(out, expected_out), relative_error(ours, expected))

        def torch_norm(index: int) -> Tensor:
            residual[index].add_(x[index])
            return F.rms_norm(residual[index], (size,), weight, EPS)

        return Built(
            {
                OURS: Contestant(
                    [partial(ops.add_rms_norm, x[i], residual[i], weight, EPS, None) for i in range(sets)], error
                ),
                "torch": Contestant([partial(torch_norm, i) for i in range(sets)], None),
            }
        )

    return Case("elementwise", f"add_rms_norm {num_tokens} x {size}", num_bytes, build, 0, targets)


def _gated(
    op: str, num_tokens: int, size: int, dtype: torch.dtype, device: torch.device, targets: tuple[Target, ...]
) -> Case:
    """op: silu_and_mul or gelu_tanh_and_mul."""
    num_bytes = 3 * num_tokens * size * dtype.itemsize

    def build() -> Built:
        x = torch.randn(num_sets(num_bytes, device), num_tokens, 2 * size, dtype=dtype, device=device)

        ours, expected = (partial(getattr(module, op), dtype=None) for module in (ops, reference))

        def by_torch(tokens: Tensor) -> Tensor:
            gate, up = tokens.chunk(2, dim=-1)
            return (F.silu(gate) if op == "silu_and_mul" else F.gelu(gate, approximate="tanh")) * up

        def error() -> float:
            return relative_error(ours(x[0]), expected(x[0]))

        return Built(
            {
                OURS: Contestant([partial(ours, tokens) for tokens in x], error),
                "torch": Contestant([partial(by_torch, tokens) for tokens in x], None),
            }
        )

    return Case("elementwise", f"{op} {num_tokens} x {size}", num_bytes, build, 0, targets)


def _rotary(
    num_tokens: int, variant: str, dtype: torch.dtype, device: torch.device, targets: tuple[Target, ...]
) -> Case:
    kv_dtype = torch.float8_e4m3fn if variant == "fp8" else dtype
    num_all_heads = NUM_HEADS + 2 * NUM_KV_HEADS
    read = (num_all_heads * dtype.itemsize + 4) * HEAD_DIM + 16  # cos and sin of a position, the position, the slot
    written = (NUM_HEADS * dtype.itemsize + 2 * NUM_KV_HEADS * kv_dtype.itemsize) * HEAD_DIM
    num_bytes = num_tokens * (read + written)

    def build() -> Built:
        sets = num_sets(num_bytes, device)
        num_blocks = 2 * -(-num_tokens // BLOCK_SIZE)
        qkv = torch.randn(sets, num_tokens, num_all_heads, HEAD_DIM, dtype=dtype, device=device)
        page_shape = (num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        caches = [torch.randn(page_shape, dtype=dtype, device=device).to(kv_dtype) for _ in range(sets)]
        angles = torch.rand(MAX_POSITION, HEAD_DIM // 2, device=device) * 6.28
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        positions = torch.randint(0, MAX_POSITION, (num_tokens,), device=device)
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
        weights = (None, None)
        if variant == "q/k norm":
            q_weight, k_weight = torch.randn(2, HEAD_DIM, dtype=dtype, device=device)
            weights = (q_weight, k_weight)
        scales = torch.rand(2, NUM_KV_HEADS, device=device) + 0.5 if variant == "fp8" else None

        def error() -> float:
            results = []
            for rotary_store_kv in (ops.rotary_store_kv, reference.rotary_store_kv):
                tokens, cache = qkv[0].clone(), caches[0].clone()
                rotary_store_kv(positions, tokens, cos_sin, cache, slots, *weights, EPS, scales)
                results.append((tokens[:, :NUM_HEADS], cache.float()))
            (query, cache), (expected_query, expected_cache) = results
            return max(relative_error(query, expected_query), relative_error(cache, expected_cache))

        calls: list[Call] = [
            partial(ops.rotary_store_kv, positions, tokens, cos_sin, cache, slots, *weights, EPS, scales)
            for tokens, cache in zip(qkv, caches, strict=True)
        ]
        return Built({OURS: Contestant(calls, error)})

    name = f"rotary_store_kv {num_tokens} {variant}".strip()
    return Case("elementwise", name, num_bytes, build, 0, targets)


def step_cases(device: torch.device, small: bool) -> Iterator[Case]:
    """A decode step, and one that computes prompts."""
    if small:
        yield _step_inputs([1] * 3, 20, device)
        return
    yield _step_inputs([1] * 256, 1024, device)
    yield _step_inputs([2048] * 4, 2048, device)


def _step_inputs(query_lens: list[int], context_len: int, device: torch.device) -> Case:
    """Latency, not bytes, is what counts here."""
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    pages = -(-(context_len + query_lens[0]) // BLOCK_SIZE)
    num_bytes = 4 * 2 * num_reqs * pages + num_tokens * (4 + 3 * 8) + num_reqs * 32

    def build() -> Built:
        # A row moves on with every call; reset() comes before each replay, and a graph's calls go round the sets.
        sets = MAX_SETS if device.type == "cuda" else 1
        max_model_len = context_len + query_lens[0] * (MAX_GRAPH_CALLS // sets + 2)
        max_blocks = -(-max_model_len // BLOCK_SIZE)

        def ints(values: Tensor) -> Tensor:
            return values.int().to(device)

        starts = ints(torch.tensor([0, *query_lens]).cumsum(0))
        rows, num_blocks = ints(torch.randperm(num_reqs)), ints(torch.full((num_reqs, 1), pages))
        token_ids = ints(torch.randint(0, 50_000, (num_reqs, max_model_len)))
        row_blocks = ints(torch.randperm(num_reqs * max_blocks).view(1, num_reqs, max_blocks))
        no_blocks, no_starts = ints(torch.zeros(1)), ints(torch.zeros(num_reqs + 1))
        computed = torch.full((sets, num_reqs), context_len, device=device)

        def arguments(index: int) -> tuple[Any, ...]:
            outputs = torch.full((3, num_tokens), -7, dtype=torch.int64, device=device)
            seq_lens, table = ints(torch.full((num_reqs,), -7)), ints(torch.full((1, num_reqs, max_blocks), -7))
            return (
                rows,
                starts,
                num_blocks,
                no_starts,
                no_blocks,
                token_ids,
                computed[index],
                row_blocks,
                *outputs[:2],
                outputs[2:],
                seq_lens,
                table,
                BLOCK_SIZE,
            )

        def reset() -> None:
            computed.fill_(context_len)

        def error() -> float:
            results = []
            for step_inputs in (ops.step_inputs, reference.step_inputs):
                reset()
                given = arguments(0)
                step_inputs(*given)
                results.append([tensor.clone() for tensor in given if isinstance(tensor, Tensor)])
            reset()
            equal = all(torch.equal(ours, expected) for ours, expected in zip(*results, strict=True))
            return 0.0 if equal else float("nan")

        calls: list[Call] = [partial(ops.step_inputs, *arguments(index)) for index in range(sets)]
        return Built({OURS: Contestant(calls, error, 0.0)}, reset)

    return Case("step", f"step_inputs {num_reqs} x {query_lens[0]} at {context_len}", num_bytes, build)
