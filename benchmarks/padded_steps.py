"""What padding a decode step costs on a CPU, and what recording it does: `python -m benchmarks.padded_steps [MODEL]`.

Steps of the model alone, without sampling, on one thread and in its processor time, so that others on the machine
matter little. "padded" is a replayed step of so many requests without attention for those beyond the first number,
"eager" the step from Python, "recording" the step while it is recorded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.executor_step import Step, bind_cache, blocks_of
from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from pagewire.kernels.cpu.recording import Memory, record
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model

CONTEXT = 128
ROUNDS = 10
# Requests, and sizes that they could be padded to
SIZES = {1: (), 5: (8,), 9: (10, 12, 16), 13: (14, 16), 17: (18, 20, 24), 33: (36, 40, 48), 49: (52, 56, 64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", help="as of `pagewire serve`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(
        resolve_model(args.model), dtype="bfloat16", device=torch.device("cpu"), quantization=args.quantization
    )
    bind_cache(model, max(SIZES) * 2 * blocks_of(CONTEXT + 1))
    print(f"{'requests':>10}{'eager':>10}{'recording':>10}  replayed; padded to")
    for num_requests, sizes in SIZES.items():
        print_row(model, num_requests, sizes)


@torch.inference_mode()
def print_row(model: Model, num_requests: int, sizes: tuple[int, ...]) -> None:
    """ms of processor time."""
    memory, step = Memory(), Step.decode(model, num_requests, CONTEXT)
    eager = best(step.run, 3)
    recording = best(lambda: record(step.run, memory), 3)
    steps = [padded(model, num_requests, size) for size in (num_requests, *sizes)]
    replays = [record(step.run, memory) for step in steps]
    times = [float("inf")] * len(replays)
    for _ in range(ROUNDS):  # in turns
        times = [min(before, best(replay.replay, 1)) for before, replay in zip(times, replays, strict=True)]
    exact, *others = times
    columns = [
        f"{size}: {1e3 * seconds:.2f} ({100 * seconds / exact - 100:+.0f} %)"
        for size, seconds in zip(sizes, others, strict=True)
    ]
    print(
        f"{num_requests:>10}{1e3 * eager:>10.2f}{1e3 * recording:>10.2f}  {1e3 * exact:.2f}",
        *columns,
        sep="  ",
        flush=True,
    )


def padded(model: Model, num_requests: int, size: int) -> Step:
    step = Step.decode(model, size, CONTEXT)
    step.context.rows[num_requests:] = -1
    step.context.seq_lens[num_requests:] = 0
    for slots in step.context.slot_mappings:
        slots[num_requests:] = -1
    return step


def best(function: Callable[[], object], rounds: int) -> float:
    """Seconds of this thread."""
    times = []
    for _ in range(rounds):
        started = time.thread_time()
        function()
        times.append(time.thread_time() - started)
    return min(times)


if __name__ == "__main__":
    main()
