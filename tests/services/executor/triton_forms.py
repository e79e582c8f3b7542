"""Which forms of the Triton kernels the executor asks for, without a GPU. Run by test_triton_executor.py as

    python -m tests.services.executor.triton_forms DIRECTORY

Triton decides by the arguments of a launch (1, multiples of 16, aligned pointers, constants) which form of a kernel it
compiles. Here that decision is all that happens: nothing is compiled, and kernels leave their results as they find
them. Prints as JSON how many forms the warm-up takes, and each one that steps of serving ask for besides.
"""

from __future__ import annotations

import importlib
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import cpu
from services.executor.loader import load_model
from services.executor.model_runner import DUMMY_SAMPLING, Limits, ModelRunner
from services.executor.step import RowSampling
from services.executor.warm_up import warm_up
from tests.services.executor.stepping import BLOCK_SIZE, CPU, write_tiny_llama

# REQS is 128 or 512; the 200 tokens of the vocabulary are 2 groups.
LIMITS = Limits(max_num_seqs=130, max_num_batched_tokens=1024, max_model_len=96, block_size=BLOCK_SIZE)
EXTRAS = (
    RowSampling(),
    RowSampling(logprobs=0),
    RowSampling(logprobs=1),
    RowSampling(logprobs=16),
    RowSampling(repetition_penalty=1.2, logit_bias=((3, 1.0),)),
)


class Device:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Form:
    """In place of a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, grid_x: int, grid_y: int, grid_z: int, *args: Any) -> None:
        assert 0 < grid_x < 2**31 and 0 < grid_y < 2**16 and 0 < grid_z < 2**16


def main() -> int:
    forms: list[str] = []

    def compile_nothing(self: Any, key: str, signature: Any, device: int, *args: Any) -> Form:
        forms.append(f"{self.fn.__name__} {key}")
        return self.device_caches[device][0].setdefault(key, Form())

    def implementation(name: str, module: str) -> Any:
        return getattr(importlib.import_module(f"kernels.{module}"), name)

    triton.runtime.driver.set_active(Device())
    JITFunction._do_compile = compile_nothing
    cpu.implementation = implementation
    model = load_model(write_tiny_llama(Path(sys.argv[1])), dtype="float16", device=CPU, load_format="dummy")
    runner = ModelRunner(model, LIMITS, 4096, CPU)
    warm_up(runner, torch.device("cuda"))
    warmed_up = len(forms)
    for num_reqs, length, sampling in product((1, 3, 8, 129), (1, 3, 20), (DUMMY_SAMPLING, *EXTRAS)):
        runner.dummy_run(num_reqs, num_reqs - 1 + length, sampling=sampling)
    print(json.dumps({"warm-up": warmed_up, "serving": forms[warmed_up:]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
