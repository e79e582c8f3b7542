"""Compiles every kernel for GPUs that need not be there, and records what a program of each uses."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import triton

from benchmarks.kernels.compiler import ARCHITECTURES, Resources, Specialization, compile_for
from benchmarks.kernels.forms.specializations import all_forms

# The record is a fixture: a test compares the forms of the code with it.
RECORD = Path(__file__).parents[2] / "tests" / "kernels" / "compiled" / "compiled_forms.md"
# Stack bytes per thread: spilled registers. A few move with every Triton version; many are a slow kernel.
MAX_STACK = 64

Record = dict[tuple[str, str], dict[int, Resources]]  # (kernel's name, variant) -> capability -> resources


def faults(capability: int, used: Resources) -> list[str]:
    """Returns why a program that uses so much cannot be launched on an architecture."""
    architecture = ARCHITECTURES[capability]
    found = []
    if used.shared > architecture.shared_per_block:
        found.append(f"{used.shared} bytes of shared memory, a block has {architecture.shared_per_block}")
    if used.stack > MAX_STACK:
        found.append(f"{used.stack} bytes of stack, bound {MAX_STACK}")
    if used.programs_per_sm(architecture) < 1:
        found.append("no multiprocessor can hold a program")
    return found


def compile_all(forms: Iterable[tuple[int, Specialization]]) -> tuple[Record, list[str]]:
    """Compiles (capability, form) one after the other, a line for each; returns what they use, and all faults."""
    record: Record = {}
    failed = []
    for capability, form in forms:
        started = time.perf_counter()
        used = compile_for(form, capability)
        record.setdefault((form.name, form.variant), {})[capability] = used
        found = faults(capability, used)
        failed += [f"{form.name} {form.variant} sm_{capability}: {fault}" for fault in found]
        seconds = time.perf_counter() - started
        verdict = "FAILED" if found else "ok"
        print(f"{verdict} sm_{capability} {form.name} {form.variant} | {cell(used)} | {seconds:.1f} s", flush=True)
    return record, failed


def cell(used: Resources) -> str:
    return f"{used.registers} / {used.stack} / {used.shared}"


def run() -> int:
    """Compiles everything and writes the record; the exit code."""
    forms = [(capability, form) for capability in ARCHITECTURES for form in all_forms(capability).values()]
    started = time.perf_counter()
    record, failed = compile_all(forms)
    write(record)
    print(f"{len(forms)} compiled in {time.perf_counter() - started:.0f} s (Triton keeps what it compiled): {RECORD}")
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


def write(record: Record) -> None:
    """Writes the record, a table per kernel, in place of the last one."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    capabilities = list(ARCHITECTURES)
    lines = [
        f"# Kernels compiled ahead of time, {date}, Triton {triton.__version__}",
        "",
        "Written by `python -m benchmarks.kernels aot`; nothing here was measured on a GPU. A cell holds registers per",
        "thread / bytes of stack per thread (spills) / bytes of shared memory per program; a dash where this form is",
        "not for the architecture.",
    ]
    for kernel in sorted({name for name, _ in record}):
        lines += ["", f"## {kernel}", ""]
        lines += ["| form | " + " | ".join(f"sm_{capability}" for capability in capabilities) + " |"]
        lines += ["| --- |" + " --- |" * len(capabilities)]
        for (name, variant), resources in record.items():
            if name == kernel:
                cells = [cell(resources[c]) if c in resources else "-" for c in capabilities]
                lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    RECORD.write_text("\n".join(lines) + "\n")


def recorded() -> dict[tuple[int, str, str], Resources]:
    """Returns (capability, kernel's name, variant) of everything in the committed record -> what it uses."""
    found = {}
    kernel = ""
    for line in RECORD.read_text().splitlines():
        if line.startswith("## "):
            kernel = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| form ", "| --- ")):
            variant, *cells = (part.strip() for part in line.strip("|").split("|"))
            num_warps = int(variant.rpartition("num_warps=")[2].split()[0])
            for capability, text in zip(ARCHITECTURES, cells, strict=True):
                if text != "-":
                    registers, stack, shared = map(int, text.split(" / "))
                    found[capability, kernel, variant] = Resources(registers, stack, shared, 32 * num_warps)
    return found
