"""Compile every Triton kernel for several GPUs, without one. Run by test_triton.py as

    python -m tests.kernels.triton_aot

in a process of its own (not the interpreter's). Prints one line per kernel and architecture; the exit status tells
whether all compiled, fit in shared memory and keep their spills below the bound.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import activation, kv_cache, norm, paged_attention, rotary, step_inputs

# compute capability -> shared memory that one block may use, in bytes
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
# Stack bytes per thread: spilled registers. A few move with every Triton version; many are a slow kernel.
MAX_STACK = 64


@dataclass(frozen=True)
class Kernel:
    name: str
    function: Any
    types: dict[str, str]  # of the run-time arguments; a pointer is 16-byte aligned, integers are strides
    constants: dict[str, Any]
    num_warps: int = 4


def attention(name: str, group: int, head_dim: int, dtype: str, max_query_len: int, **features: bool) -> Kernel:
    rows = paged_attention.tile_rows(group, max_query_len)
    types = {
        "query_ptr": f"*{dtype}",
        "kv_cache_ptr": f"*{dtype}",
        "out_ptr": f"*{dtype}",
        "block_table_ptr": "*i32",
        "query_start_loc_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "num_reqs": "i32",
        "query_token_stride": "i32",
        "query_head_stride": "i32",
        "out_token_stride": "i32",
        "block_stride": "i32",
        "value_stride": "i32",
        "head_stride": "i32",
        "table_stride": "i32",
        "scale": "fp32",
        "sliding_window": "i32",
        "soft_cap": "fp32",
    }
    constants = {
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "DIMS": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": rows,
        "BLOCK_Q": rows // group,
        "BLOCK_N": 32,
        "HAS_WINDOW": features.get("window", False),
        "HAS_SOFT_CAP": features.get("soft_cap", False),
    }
    warps = paged_attention.tile_warps(rows, constants["DIMS"])
    return Kernel(name, paged_attention.paged_attention_kernel, types, constants, warps)


KERNELS = [
    attention("attention decode", 3, 64, "bf16", 1),
    attention("attention prefill", 4, 128, "bf16", 512),
    attention("attention window, cap", 2, 256, "bf16", 512, window=True, soft_cap=True),
    attention("attention odd head_dim fp16", 1, 80, "fp16", 64),
    Kernel("store_kv", *kv_cache.specialization("bf16", 8, 128)),
    Kernel("store_kv fp8, one token", *kv_cache.specialization("fp16", 3, 80, many_tokens=False, fp8=True)),
    Kernel("rotary_store_kv", *rotary.specialization("bf16", 32, 8, 128, 128)),
    Kernel("rotary_store_kv one token", *rotary.specialization("bf16", 14, 2, 64, 64, many_tokens=False)),
    Kernel("rotary_store_kv norm fp8", *rotary.specialization("bf16", 16, 8, 256, 256, norm=True, fp8=True)),
    Kernel("rotary_store_kv norm, part of a head", *rotary.specialization("fp16", 32, 32, 80, 32, norm=True)),
    Kernel("add_rms_norm", *norm.specialization("bf16", 4096)),
    Kernel("add_rms_norm few rows", *norm.specialization("bf16", 16384, many_rows=False)),
    Kernel("silu_and_mul", *activation.specialization("bf16", 14336)),
    Kernel("gelu_tanh_and_mul", *activation.specialization("fp16", 4864, gelu=True)),
    Kernel("step_inputs", *step_inputs.specialization(16)),
]


def compile_for(kernel: Kernel, capability: int) -> Any:
    """The compiled kernel, with pointers and strides known to be multiples of 16, as they are in a real launch."""
    names = kernel.function.arg_names
    signature = {name: kernel.types.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(kernel.function, signature, constexprs=kernel.constants, attrs=aligned)
    options = {"num_warps": kernel.num_warps, "num_stages": 2}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_bytes(cubin: bytes) -> int:
    """Stack bytes per thread, from the compiler's resource table."""
    tool = next((Path(triton.__file__).parent / "backends/nvidia/bin").glob("cuobjdump*"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(stack) for stack in re.findall(r"STACK:(\d+)", table))


def main() -> int:
    failed = 0
    for kernel in KERNELS:
        for capability, shared_limit in SHARED_MEMORY.items():
            compiled = compile_for(kernel, capability)
            shared, stack = compiled.metadata.shared, stack_bytes(compiled.asm["cubin"])
            good = shared <= shared_limit and stack <= MAX_STACK
            failed += not good
            verdict = "ok" if good else "FAILED"
            usage = f"shared {shared} of {shared_limit}, stack {stack} of {MAX_STACK}"
            print(f"{verdict} {kernel.name} sm_{capability}: {usage}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
