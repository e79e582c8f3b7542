"""The few PTX instructions that decoders of packed weights consist of, carried out: Triton's interpreter knows none."""

from __future__ import annotations

import re

import torch
from torch import Tensor


def halves(register: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The two numbers of 16 bits in a register, the lower half's first."""
    return [(register >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(dtype).float() for shift in (0, 16)]


def single(register: Tensor) -> Tensor:
    """A register as fp32."""
    return register.to(torch.int32).view(torch.float32)


def register_of(low: Tensor, high: Tensor) -> Tensor:
    """Two numbers of 16 bits in one register."""
    low, high = (half.view(torch.int16).long() & 0xFFFF for half in (low, high))
    return low | high << 16


def run(text: str, registers: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Carries out `text` on registers of 32 bits held as int64; dtype of what x2 instructions compute with."""

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
        elif operation in ("shr.b32", "shr.u32"):
            registers[target] = value(sources[0]) >> int(sources[1])
        elif operation == "and.b32":
            registers[target] = value(sources[0]) & value(sources[1])
        elif operation == "lop3.b32":
            assert sources[3] == "0xea", "the table of (a & b) | c"
            registers[target] = value(sources[0]) & value(sources[1]) | value(sources[2])
        elif operation.startswith(("fma.rn.", "add.rn.")) and operation.endswith("x2"):
            assert {torch.float16: "f16x2", torch.bfloat16: "bf16x2"}[dtype] == operation.rpartition(".")[2]
            operands = [halves(value(source), dtype) for source in sources]
            results = []
            for numbers in zip(*operands, strict=True):
                first, second, *third = numbers
                results.append((first * second + third[0] if third else first + second).to(dtype))
            registers[target] = register_of(*torch.broadcast_tensors(*results))
        elif operation == "add.rn.f32":
            total = single(value(sources[0])) + single(value(sources[1]))
            registers[target] = total.view(torch.int32).long() & 0xFFFFFFFF
        else:
            assert operation == "reg", f"{operation} is not known here"
    return registers
