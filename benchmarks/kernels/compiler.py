"""Triton kernels compiled ahead of time, for GPUs that need not be there, and what a program of each would use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Architecture:
    """The limits of the CUDA programming guide, in bytes and 32-bit registers."""

    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    registers_per_sm: int = 65536


ARCHITECTURES = {
    80: Architecture(163 * 1024, 164 * 1024, 2048),
    89: Architecture(99 * 1024, 100 * 1024, 1536),
    90: Architecture(227 * 1024, 228 * 1024, 2048),
}
RESERVED_SHARED = 1024  # of every block, for the system


@dataclass(frozen=True)
class Specialization:
    """One compiled form of a kernel: types of its run-time arguments, values of its constexprs, launch options."""

    kernel: Any  # a triton.JITFunction
    types: Mapping[str, str]  # pointers are 16-byte aligned, integers named *stride multiples of 16
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def variant(self) -> str:
        """A readable name that distinguishes this form from the others of its kernel."""
        pointers = {name: kind for name, kind in self.types.items() if kind.startswith(("*bf", "*f", "*i8", "*u8"))}
        types = " ".join(f"{name.removesuffix('_ptr')}:{kind[1:]}" for name, kind in pointers.items())
        constants = " ".join(f"{name.lower()}={value}" for name, value in self.constants.items())
        return f"{types}; {constants}; num_warps={self.num_warps} num_stages={self.num_stages}"


@dataclass(frozen=True)
class Resources:
    """Per thread: registers and stack bytes (spills); per program: shared memory in bytes and threads."""

    registers: int
    stack: int
    shared: int
    threads: int

    def programs_per_sm(self, architecture: Architecture) -> int:
        """Returns how many programs an SM holds at once."""
        # Registers are handed out to warps in units of 256, and so 8 per thread.
        registers = -(-self.registers // 8) * 8 * self.threads
        return min(
            architecture.registers_per_sm // registers,
            architecture.shared_per_sm // (self.shared + RESERVED_SHARED),
            architecture.threads_per_sm // self.threads,
        )


def compile_for(specialization: Specialization, capability: int) -> Resources:
    """Raises Triton's CompilationError for what cannot be compiled."""
    compiled = _compile(specialization, capability)
    registers, stack = _registers_and_stack(compiled.asm["cubin"])
    return Resources(registers, stack, compiled.metadata.shared, 32 * compiled.metadata.num_warps)


def instructions(specialization: Specialization, capability: int) -> Counter[str]:
    """Returns how often each machine instruction occurs, as "HMMA.16816.F32.BF16", whatever its operands."""
    listing = _dump("-sass", _compile(specialization, capability).asm["cubin"])
    # /*0250*/  @!P0 LDG.E R1, desc[UR8][R2.64] ;
    return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", listing, re.MULTILINE))


def ptx(specialization: Specialization, capability: int) -> str:
    """Returns what Triton gives the assembler."""
    return str(_compile(specialization, capability).asm["ptx"])


def _compile(specialization: Specialization, capability: int) -> Any:
    names = specialization.kernel.arg_names
    signature = {name: specialization.types.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, parameter in enumerate(specialization.kernel.params)
        if not parameter.do_not_specialize
        and (signature[parameter.name].startswith("*") or parameter.name.endswith(("stride", "vocab_size")))
    }
    source = ASTSource(specialization.kernel, signature, constexprs=dict(specialization.constants), attrs=aligned)
    options = {"num_warps": specialization.num_warps, "num_stages": specialization.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    usage = re.findall(r"REG:(\d+) STACK:(\d+)", _dump("--dump-resource-usage", cubin))
    return max(int(registers) for registers, _ in usage), max(int(stack) for _, stack in usage)


def _dump(what: str, cubin: bytes) -> str:
    """cuobjdump's output."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_cuobjdump()), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def _cuobjdump() -> Path:
    return next((Path(triton.__file__).parent / "backends/nvidia/bin").glob("cuobjdump*"))
