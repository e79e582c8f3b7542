"""Tensor-core products in bf16, the dtype of most models, in Triton's interpreter. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.bf16

The interpreter has bf16 as bits in integers, and its tl.dot multiplies these; from integers it makes the bits of their
value as an integer. Here it converts both first. Its casts to bf16 truncate, so the tolerance is twice that of
rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.triton import attention as triton_attention
from tests.kernels.triton import grouped as triton_grouped
from tests.kernels.triton import scaled_product as triton_scaled_product
from tests.kernels.triton.interpreted import run_cases

_dot = interpreter.InterpreterBuilder.create_dot


def _floats(operand: interpreter.TensorHandle) -> np.ndarray:
    if operand.dtype.scalar != tl.bfloat16:
        return operand.data
    return (operand.data.astype(np.uint32) << 16).view(np.float32)


def _create_dot(self, a, b, acc, input_precision, max_imprecise):  # type: ignore[no-untyped-def]
    if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
        return _dot(self, a, b, acc, input_precision, max_imprecise)
    product = np.matmul(_floats(a), _floats(b), dtype=np.float32)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


_si_to_fp = interpreter.InterpreterBuilder.create_si_to_fp


def _create_si_to_fp(self, source, target):  # type: ignore[no-untyped-def]
    if target.scalar != tl.bfloat16:
        return _si_to_fp(self, source, target)
    bits = source.data.astype(np.float32).view(np.uint32) >> 16
    return interpreter.TensorHandle(bits.astype(np.uint16), tl.bfloat16)


bf16 = partial(triton_attention.case, dtype=torch.bfloat16)

CASES: dict[str, Callable[[], None]] = {
    "decode, splits": partial(bf16, [1, 1, 1], [0, 300, 70], (8, 2)),
    "decode fp8": partial(bf16, [1, 1], [40, 90], (4, 2), cache="fp8"),
    "prefill": partial(bf16, [40, 20], [0, 30], (4, 2)),
    "mixed fp8, odd head_dim": partial(bf16, [1, 33], [50, 7], (6, 2), cache="fp8", head_dim=80),
    "mixed int8, odd head_dim": partial(bf16, [1, 33], [50, 7], (6, 2), cache="int8", head_dim=80),
    "grouped_linear": partial(triton_grouped.product_case, "gemm", 3, (40, 200), 4, 32, "minimums", torch.bfloat16),
    "grouped_linear, wide": partial(
        triton_grouped.product_case, "gemm", 3, (40, 200), 4, 128, "zeros", torch.bfloat16, wide=1
    ),
    "grouped_linear, one row": partial(
        triton_grouped.product_case, "gemm", 1, (40, 200), 8, 64, "zeros", torch.bfloat16
    ),
    "grouped_linear, dense": partial(triton_grouped.product_case, "dense", 3, (40, 200), 4, 64, "fp32", torch.bfloat16),
    "int8_linear": partial(triton_scaled_product.int8_case, (3, 40, 200), torch.bfloat16, bias=True),
    "fp8_linear": partial(triton_scaled_product.fp8_case, (3, 40, 200), torch.bfloat16, bias=True),
    "fp8_linear, weight-only": partial(triton_scaled_product.weight_only, (3, 40, 200), torch.bfloat16, bias=True),
}


if __name__ == "__main__":
    interpreter.InterpreterBuilder.create_dot = _create_dot  # means nothing on a GPU
    interpreter.InterpreterBuilder.create_si_to_fp = _create_si_to_fp
    triton_attention.TOLERANCES[torch.bfloat16] = 2e-2
    sys.exit(run_cases(CASES))
