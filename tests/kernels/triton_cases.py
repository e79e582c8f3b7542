"""Triton kernels against the references, in Triton's interpreter on the CPU. Run by test_triton.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton_cases

in a process of its own, because Triton reads the variable when a kernel is defined. fp32 and fp16 only: the
interpreter multiplies bf16 bit patterns. Prints one line per case; the exit status tells whether all passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from kernels import activation, kv_cache, norm, paged_attention, reference, rotary
from tests.kernels.batches import make_batch

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}


def attention_case(
    dtype: torch.dtype,
    query_lens: list[int],
    context_lens: list[int],
    heads: tuple[int, int],
    head_dim: int = 64,
    block_size: int = 16,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    batch = make_batch(
        query_lens,
        context_lens,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    actual = paged_attention.paged_attention(*batch.args(), sliding_window, soft_cap)
    expected = reference.paged_attention(*batch.exact().args(), sliding_window, soft_cap)
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def store_kv_case(dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 6 * 80).to(dtype)
    key = qkv[:, : 3 * 80].view(5, 3, 80)
    value = qkv[:, 3 * 80 :].view(5, 3, 80)
    slots = torch.tensor([17, -1, 0, 79, 40])
    actual = torch.zeros(5, 2, 3, 16, 80, dtype=dtype)
    expected = actual.clone()
    kv_cache.store_kv(key, value, actual, slots)
    reference.store_kv(key, value, expected, slots)
    assert torch.equal(actual, expected)


def norm_case(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 9 * 72).to(dtype), torch.randn(9 * 72).to(dtype)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=tolerance, rtol=tolerance
    )
    heads = x[:, : 3 * 72].view(4, 3, 72)  # a strided view, as for norms per head
    torch.testing.assert_close(
        norm.rms_norm(heads, weight[:72], 1e-5),
        reference.rms_norm(heads, weight[:72], 1e-5),
        atol=tolerance,
        rtol=tolerance,
    )
    residual = torch.randn(4, 9 * 72).to(dtype)
    expected_residual = residual.clone()
    actual = norm.add_rms_norm(x, residual, weight, 1e-5)
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    torch.testing.assert_close(residual, expected_residual, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def rotary_case(dtype: torch.dtype, rotary_dim: int) -> None:
    qkv = torch.randn(3, (9 + 6) * 64).to(dtype)
    other = qkv.clone()
    positions = torch.tensor([0, 5, 31])
    cos_sin = torch.randn(32, rotary_dim)
    for tensor, function in ((qkv, rotary.rotary_embedding), (other, reference.rotary_embedding)):
        query, key = tensor[:, : 9 * 64].view(3, 9, 64), tensor[:, 9 * 64 : 12 * 64].view(3, 3, 64)
        function(positions, query, key, cos_sin, 64)
    torch.testing.assert_close(qkv, other, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def activation_case(dtype: torch.dtype) -> None:
    x = 3 * torch.randn(3, 2 * 200).to(dtype)
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        torch.testing.assert_close(
            getattr(activation, name)(x),
            getattr(reference, name)(x),
            atol=TOLERANCES[dtype],
            rtol=TOLERANCES[dtype],
        )


CASES: dict[str, Callable[[], None]] = {
    "decode": lambda: attention_case(torch.float32, [1, 1, 1], [0, 15, 70], (9, 3)),
    "decode fp16": lambda: attention_case(torch.float16, [1, 1], [33, 16], (8, 2), block_size=32),
    "prefill": lambda: attention_case(torch.float32, [7, 33], [0, 0], (3, 1)),
    "mixed, empty requests": lambda: attention_case(torch.float32, [0, 1, 20, 0, 5], [9, 40, 0, 0, 50], (4, 4)),
    "mixed fp16": lambda: attention_case(torch.float16, [1, 18, 1], [20, 30, 0], (8, 1), 128),
    "odd head_dim": lambda: attention_case(torch.float32, [3, 1], [17, 4], (6, 2), 80, 8),
    "window": lambda: attention_case(torch.float32, [1, 30, 4], [90, 20, 0], (3, 1), sliding_window=11),
    "soft cap": lambda: attention_case(torch.float32, [1, 9], [40, 3], (4, 2), soft_cap=5.0),
    "store_kv": lambda: store_kv_case(torch.float16),
    "norms": lambda: norm_case(torch.float32),
    "norms fp16": lambda: norm_case(torch.float16),
    "rotary": lambda: rotary_case(torch.float32, 64),
    "rotary, part of a head": lambda: rotary_case(torch.float16, 40),
    "activations": lambda: activation_case(torch.float32),
    "activations fp16": lambda: activation_case(torch.float16),
}


def main() -> int:
    torch.manual_seed(0)
    failed = 0
    for name, case in CASES.items():
        try:
            case()
            print(f"ok {name}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {name}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
