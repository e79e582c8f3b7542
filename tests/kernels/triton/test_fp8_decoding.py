"""The instructions that turn e4m3 weights into fp16 and bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from pagewire.kernels.triton.products import fp8_weights
from tests.kernels.compiled.ptx import halves, run


@pytest.mark.parametrize(
    ("dtype", "text"),
    [(torch.bfloat16, fp8_weights.TO_BF16.value), (torch.float16, fp8_weights.TO_FP16.value)],
    ids=str,
)
def test_every_code_in_every_position(dtype: torch.dtype, text: str) -> None:
    codes = torch.stack([torch.arange(256).roll(-7 * position) for position in range(4)])
    word = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24
    registers = run(text, {"$2": word}, dtype)
    decoded = [*halves(registers["$0"], dtype), *halves(registers["$1"], dtype)]
    for code, actual in zip(codes, decoded, strict=True):
        expected = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
        finite = expected.isfinite()
        assert torch.equal(actual[finite], expected[finite])
        assert torch.equal(actual.signbit(), expected.signbit())
