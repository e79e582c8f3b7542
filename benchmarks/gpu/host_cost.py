"""Measures a step on the host that drives a GPU: `python -m benchmarks.gpu.host_cost [--out FILE]`, on any machine.

A model of 32 layers, like Llama-3.1-8B, runs Pagewire's Python, torch's dispatcher and Triton's launcher as on a GPU of
compute capability 9.0, up to the call into the driver, which does nothing, as does the library's product. So small
tensors on a CPU suffice. The result is a lower bound: it lacks the driver's part (some microseconds per launch, tens
per graph of hundreds of kernels) and the library's choice of a product. It is processor time of the thread, as medians,
with eager steps and graphs in turns. Kernels are compiled first, which takes a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from benchmarks.gpu.engine.models import MODELS, BenchModel
from benchmarks.gpu.engine.steps import Driver
from pagewire.kernels import backends, tuning
from pagewire.kernels.ops import DEFINITIONS, definition
from pagewire.services.executor.device import memory
from pagewire.services.executor.graphs.capture_sizes import prompt_sizes
from pagewire.services.executor.graphs.cuda_graphs import Function
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.start.graph_capture import capture_graphs

CPU = torch.device("cpu")
CAPABILITY = 90
NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
LAUNCHES, REPLAYS, OPS = "launches", "replays", "torch ops"
SIZES = (8, 64)  # of decode steps that are captured
PROMPT = 64
# name -> decodes, tokens of the prompt beside them
STEPS = {
    "decode, 64 requests": (64, 0),
    "mixed, 8 and 56 tokens": (8, 56),
    "mixed, 64 and 448 tokens": (64, 448),
    "prompt, 512 tokens": (0, 512),
}


class Device:
    """A stand-in for Triton's driver and CUDA graphs, which does nothing and counts."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.utils = self
        self.launcher_cls = lambda source, metadata: self._launch

    def _launch(self, *arguments: object) -> None:
        self.counts[LAUNCHES] += 1

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, *arguments: object) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def record(self, function: Function) -> _Graph:
        return _Graph(function, self)


class _Graph:
    def __init__(self, function: Function, device: Device) -> None:
        self.output, self._counts = function(), device.counts

    def replay(self) -> None:
        self._counts[REPLAYS] += 1


@contextmanager
def standing_in(device: Device, *, own_products: bool = False) -> Iterator[None]:
    """Tensors on the CPU are taken for a GPU's. Triton keeps the device for good. own_products: dense products are
    launched, which are all our own; by default none is, as most are a library's."""

    def implementation(name: str, backend: str | None = None) -> Callable[..., Any]:
        if name == "linear" and not own_products:
            return _no_product
        return backends.find("cuda", DEFINITIONS[name].group, name)

    triton.runtime.driver.set_active(device)
    with ExitStack() as patches:
        for module, attribute, value in (
            (backends, "chosen", lambda: "triton"),
            (definition, "implementation", implementation),
            (tuning, "capability_of", lambda device: CAPABILITY),
            (memory, "is_shared", lambda device: False),
        ):
            patches.enter_context(mock.patch.object(module, attribute, value))
        yield


def _no_product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counts[OPS] += 1
        return func(*args, **kwargs or {})


class HostDriver(Driver):
    """A driver with a last prompt that is computed beside the others."""

    def steps(self, num_decodes: int, chunk: int, count: int) -> list[float]:
        """Seconds of processor time of each of so many steps, with the same requests in all of them."""
        new = [self._request(index, PROMPT, PROMPT - 1) for index in range(num_decodes)]
        requests, num_tokens = list(range(num_decodes)), [1] * num_decodes
        if chunk:
            guest = max(SIZES)
            new.append(self._request(guest, (count + 1) * chunk, computed=0))
            requests, num_tokens = [*requests, guest], [*num_tokens, chunk]
        self.runner.reset()
        self._run(requests, np.array(num_tokens), new)
        seconds = []
        for _ in range(count - 1):
            started = time.thread_time()
            self._run(requests, np.array(num_tokens), [])
            seconds.append(time.thread_time() - started)
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="eager and by graphs in turns (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of a kind, in a round (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = Device()
    with standing_in(device), torch.inference_mode():
        eager, graphs = make_driver(arguments.steps), make_driver(arguments.steps)
        capture_graphs(graphs.runner, SIZES, lambda fraction, text: None, device.record, prompt_sizes(None, 8192))
        print_table(eager, graphs, device, arguments.rounds, arguments.steps)
    return 0


def make_driver(num_steps: int) -> HostDriver:
    wide = MODELS["llama-3.1-8b"]
    model = BenchModel("narrow", wide.config | NARROW)
    with tempfile.TemporaryDirectory() as directory:
        loaded = load_model(model.write(Path(directory)), dtype="bfloat16", device=CPU, load_format="dummy")
    longest = (num_steps + 1) * max(chunk for _, chunk in STEPS.values())
    return HostDriver(loaded, [*model.prompts(max(SIZES), PROMPT), *model.prompts(1, longest)], 16, CPU)


def print_table(eager: HostDriver, graphs: HostDriver, device: Device, rounds: int, num_steps: int) -> None:
    columns = ("ms eager", "launches", "torch ops", "ms graphs", "launches", "torch ops", "replays")
    print(f"{'step':28}", *(f"{column:>10}" for column in columns))
    for name, (num_decodes, chunk) in STEPS.items():
        seconds: dict[HostDriver, list[float]] = {eager: [], graphs: []}
        for _ in range(1 + rounds):
            for driver in seconds:
                seconds[driver].append(statistics.median(driver.steps(num_decodes, chunk, num_steps)))
        cells = list[str]()
        for driver in seconds:
            counts = _counted(driver, device, num_decodes, chunk, 3) - _counted(driver, device, num_decodes, chunk, 2)
            cells.append(f"{1e3 * statistics.median(seconds[driver][1:]):.2f}")
            cells += [str(counts[what]) for what in (LAUNCHES, OPS, REPLAYS)]
        print(f"{name:28}", *(f"{cell:>10}" for cell in (*cells[:3], *cells[4:])), flush=True)


def _counted(driver: HostDriver, device: Device, num_decodes: int, chunk: int, num_steps: int) -> Counter[str]:
    device.counts.clear()
    with _Counting(device.counts):
        driver.steps(num_decodes, chunk, num_steps)
    return device.counts.copy()


if __name__ == "__main__":
    sys.exit(main())
