"""Checks that a kernel can be captured and replayed: `python -m benchmarks.gpu.smoke decode_attention`.

Its result on random data is compared with the reference before and after 1,000 replays of a graph, after which all
counters of arrived programs must be 0 again. `executor` is a small random model: graphs are compared with eager steps,
and both with the reference's operations on the CPU. Prints a line "FAILED ..." per fault and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

NUM_REPLAYS = 1000
EXECUTOR = "executor"
# Of the largest logit. bf16 rounds sums of different order at other places.
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help=f"a kernel with a tuning table, or {EXECUTOR}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--replays", type=int, default=NUM_REPLAYS, help="0: no graph (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    if arguments.what == EXECUTOR:
        found = executor_faults(device)
    else:
        found = kernel_faults(arguments.what, device, arguments.replays)
    failed = 0
    for fault in found:
        print(f"FAILED {arguments.what}: {fault}", flush=True)
        failed += 1
    print(f"{arguments.what}: {failed} wrong", flush=True)
    return int(failed > 0)


def kernel_faults(kernel: str, device: torch.device, num_replays: int) -> Iterator[str]:
    """Yields the faults of a kernel in `pagewire.kernels.tuning`, on small shapes."""
    # Where Triton interprets, kernels have to be defined after TRITON_INTERPRET is set.
    from benchmarks.kernels.problems.problem_sets import problems_of
    from benchmarks.kernels.shapes import tuned_shapes
    from pagewire.kernels import tuning

    for shape in tuned_shapes(kernel, "tiny", tuning.capability_of(device)):
        for index, problem in enumerate(problems_of(kernel, shape, device)):
            label = f"{dict(shape)}, problem {index}"
            if not problem.is_right():
                yield f"{label}: differs from the reference"
            elif num_replays and device.type == "cuda":
                _replay(problem.calls()[0], num_replays)
                if (counted := _counted()) != 0:
                    yield f"{label}: {counted} counters are not 0 after {num_replays} replays"
                if not problem.is_right():
                    yield f"{label}: differs from the reference after {num_replays} replays"
            elif (counted := _counted()) != 0:
                yield f"{label}: {counted} counters are not 0"


def _replay(call: object, times: int) -> None:
    assert callable(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()


def _counted() -> int:
    from pagewire.kernels.triton.common import arrivals

    return sum(int(buffer.count_nonzero()) for buffers in arrivals._counters.values() for buffer in buffers)


def executor_faults(device: torch.device) -> Iterator[str]:
    """Yields the faults of a small random model with grouped heads, in every dtype of `BOUNDS`."""
    os.environ["PAGEWIRE_CPU_KERNELS"] = "torch"  # the reference's operations, before kernels are imported
    from benchmarks.gpu.engine.models import SMALL_MODEL
    from benchmarks.gpu.engine.real import model_faults

    with tempfile.TemporaryDirectory() as directory:
        path = _random_checkpoint(Path(directory), SMALL_MODEL.config)
        for dtype, bound in BOUNDS.items():
            yield from model_faults(path, device, dtype, bound)


def _random_checkpoint(path: Path, config: dict[str, object]) -> Path:
    """The same weights for every device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = str(config["model_type"])
    values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    # Weights of a normal size make logits that differ, so that a wrong one is seen.
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values, initializer_range=0.2))
    model.save_pretrained(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
