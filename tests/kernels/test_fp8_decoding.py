"""The instructions that turn e4m3 weights into fp16 and bf16: Triton's interpreter knows none, this file does."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from kernels import fp8_weights


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


def halves(register: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The two numbers of 16 bits in a register, the lower half's first."""
    return [(register >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(dtype).float() for shift in (0, 16)]


def run(text: str, registers: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Carries out PTX, of the instructions that a decoder consists of, on registers of 32 bits held as int64."""

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for operation, operands in re.findall(r"([a-z][\w.]+)\s+([^;{}]+);", text):
        target, *sources = re.split(r",\s*", operands.strip())
        if operation == "mov.b32":
            registers[target] = value(sources[0])
        elif operation == "prmt.b32":
            eight = value(sources[0]) | value(sources[1]) << 32
            picks = [int(sources[2], 0) >> 4 * position & 7 for position in range(4)]
            chosen = [(eight >> 8 * pick & 0xFF) << 8 * position for position, pick in enumerate(picks)]
            registers[target] = torch.stack(chosen).sum(0)
        elif operation == "shr.b32":
            registers[target] = value(sources[0]) >> int(sources[1])
        elif operation == "and.b32":
            registers[target] = value(sources[0]) & value(sources[1])
        elif operation == "lop3.b32":
            assert sources[3] == "0xea", "the table of (a & b) | c"
            registers[target] = value(sources[0]) & value(sources[1]) | value(sources[2])
        elif operation.startswith("fma.rn."):
            low, high = (
                (a * b + c).to(dtype).view(torch.int16).long() & 0xFFFF
                for a, b, c in zip(*(halves(value(source), dtype) for source in sources), strict=True)
            )
            registers[target] = low | high << 16
        else:
            assert operation == "reg", f"{operation} is not known here"
    return registers
