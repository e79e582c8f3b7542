"""The forms of the Triton kernels that the executor asks for, without a GPU. Run by test_triton_executor.py as

    python -m tests.services.executor.triton.forms DIRECTORY MAX_NUM_SEQS MODEL

Triton decides by the arguments of a launch (1, multiples of 16, aligned pointers, constants) which form of a kernel it
compiles. Here that decision is all that happens: nothing is compiled, and kernels leave their results as they find
them. Prints as JSON how many forms the warm-up takes, and each one that steps of serving ask for besides.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagewire.kernels import backends
from pagewire.kernels.quantized.packed import PackedFp8, PackedInt8, PackedWeight, pack_grouped
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.layers.experts.experts import ExpertsLinear
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.speculation.ngram import NgramProposer
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.warm_up import warm_up
from pagewire.services.executor.step.limits import Limits
from tests.kernels.grouped_weights import grouped_weight
from tests.services.executor.helpers.stepping import BLOCK_SIZE, CPU, MIXTRAL, sampling_params, write_tiny_llama

# With 130 requests at most, REQS is 128 or 512; the 200 tokens of the vocabulary are 2 groups.
EXTRAS = (
    sampling_params(),
    sampling_params(logprobs=0),
    sampling_params(logprobs=1),
    sampling_params(logprobs=16),
    sampling_params(prompt_logprobs=16),
    sampling_params(repetition_penalty=1.2, logit_bias=((3, 1.0),)),
)

MODELS: dict[str, dict[str, Any]] = {"llama": {}, "mixtral": MIXTRAL}


class Device:
    """A driver that answers what Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Form:
    """A stand-in for a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, grid_x: int, grid_y: int, grid_z: int, *args: Any) -> None:
        assert 0 < grid_x < 2**31 and 0 < grid_y < 2**16 and 0 < grid_z < 2**16


def quantized(kind: int, num_outputs: int, num_inputs: int) -> PackedWeight:
    """A weight of one of the kinds that have kernels of their own."""
    if kind < 3:
        bits, form = ((4, "zeros"), (4, "minimums"), (8, "symmetric"))[kind]
        weight = grouped_weight(num_outputs, num_inputs, bits, 32, form, permuted=kind == 0)
        return pack_grouped(weight, "cuda")
    codes, scales = torch.zeros(num_outputs, num_inputs, dtype=torch.int8), torch.ones(num_outputs)
    if kind == 3:
        return PackedInt8(codes, scales, None)
    return PackedFp8(codes.view(torch.float8_e4m3fn), scales if kind == 4 else torch.ones(1, 1), None)


def quantize(model: DecoderModel) -> None:
    """The layers' weights are of all kinds, one after the other, and the head is of groups."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    for index, linear in enumerate(linears):
        linear.install([quantized(2 if linear is model.lm_head else index % 6, *linear.weight.shape)])
    experts = [module for module in model.modules() if isinstance(module, ExpertsLinear)]
    for kind, projection in zip((1, 2, 4), experts, strict=False):  # and the last one is dense
        projection.install([quantized(kind, *projection.weight.shape)])


def main() -> int:
    forms: list[str] = []

    def compile_nothing(self: Any, key: str, signature: Any, device: int, *args: Any) -> Form:
        forms.append(f"{self.fn.__name__} {key}")
        return self.device_caches[device][0].setdefault(key, Form())

    triton.runtime.driver.set_active(Device())
    JITFunction._do_compile = compile_nothing
    backends.chosen = cache(lambda: "cuda")
    path = write_tiny_llama(Path(sys.argv[1]), **MODELS[sys.argv[3]])
    model = load_model(path, dtype="float16", device=CPU, load_format="dummy")
    assert isinstance(model, DecoderModel)
    quantize(model)
    limits = Limits(int(sys.argv[2]), max_num_batched_tokens=1024, max_model_len=96, block_size=BLOCK_SIZE)
    runner = assemble(model, limits, 4096, CPU, proposer=NgramProposer(2, 5, 2))
    warm_up(runner, torch.device("cuda"))
    warmed_up = len(forms)
    for num_reqs, length, sampling in product((1, 3, 8, 129), (1, 3, 20), EXTRAS):
        runner.dummy_run(num_reqs, num_reqs - 1 + length, sampling=sampling)
    for num_reqs, length in product((1, 3, 20, 129), (1, 40, 90, 300)):
        runner.dummy_run(num_reqs, num_reqs - 1 + length)
    for num_reqs, sampling in product((1, 3, 8, 129), EXTRAS):
        runner.uniform_run(BatchShape.uniform(num_reqs, 3), sampling=sampling)
    print(json.dumps({"warm-up": warmed_up, "serving": forms[warmed_up:]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
