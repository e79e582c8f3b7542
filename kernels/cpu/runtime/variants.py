"""The variants of the library that wheels hold: one per set of instructions that the kernels are written for."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Variant", "of_machine", "processor_flags", "suitable"]


@dataclass(frozen=True)
class Variant:
    """A library for processors that have all instructions of `needs`, as /proc/cpuinfo names them."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _of(name: str, flags: str, needs: str) -> Variant:
    return Variant(name, tuple(flags.split()), frozenset(needs.split()))


_AVX2 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
_AVX512_BF16 = f"{_AVX512} avx512_vnni avx512_bf16"
# The fastest first.
_VARIANTS = {
    "x86_64": (
        _of(
            "amx",
            "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8",
            f"{_AVX512_BF16} amx_tile amx_bf16 amx_int8",
        ),
        _of("avx512-bf16", "-march=x86-64-v4 -mavx512vnni -mavx512bf16", _AVX512_BF16),
        _of("avx512-vnni", "-march=x86-64-v4 -mavx512vnni", f"{_AVX512} avx512_vnni"),
        _of("avx512", "-march=x86-64-v4", _AVX512),
        _of("avx-vnni", "-march=x86-64-v3 -mavxvnni", f"{_AVX2} avx_vnni"),
        _of("avx2", "-march=x86-64-v3", _AVX2),
    ),
    "aarch64": (_of("neon", "-march=armv8-a", "asimd"),),
}


def of_machine(machine: str | None = None) -> tuple[Variant, ...]:
    """Returns the variants of an architecture, that of this machine by default, the fastest first."""
    return _VARIANTS.get(machine or platform.machine(), ())


def suitable(flags: frozenset[str], machine: str | None = None) -> tuple[Variant, ...]:
    """Returns the variants that a processor with these flags runs, the fastest first."""
    return tuple(variant for variant in of_machine(machine) if variant.needs <= flags)


def processor_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """Returns what the first processor in the text of /proc/cpuinfo can do; empty if the system does not tell."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.exists() else ""
    lines = (line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").partition(":")[2].split())
