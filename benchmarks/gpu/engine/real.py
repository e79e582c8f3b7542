"""A real checkpoint on the device: `python -m benchmarks.gpu.engine.real --model DIRECTORY`.

Its logits, in fp32 and bf16, from eager steps and from graphs, are compared with those of the CPU within bounds, and
its decode steps and first tokens are timed. `python -m benchmarks.gpu.engine.real_checkpoint` makes such a directory
of the default model, for machines that cannot read GGUF files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.engine.steps import Driver, Scores
from benchmarks.gpu.report import RESULTS, Budget, Report
from pagewire.services.executor.loading.loader import load_model

NUM_SCORED_STEPS = 24
# Of the largest logit; a CPU's bf16 rounds elsewhere.
BOUNDS = {"float32": 2e-3, "bfloat16": 5e-2}
PROMPT_LEN, NUM_REQS, NUM_STEPS = 64, 3, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the checkpoint")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="fewer steps")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to stop after (default: %(default)s)")
    arguments = parser.parse_args()
    path, device = Path(arguments.model), torch.device(arguments.device)
    budget = Budget(arguments.budget)
    report = Report("real", arguments.out, device, budget)
    for dtype, bound in BOUNDS.items():
        if budget.allows(f"{path.name} {dtype}"):
            for fault in model_faults(path, device, dtype, bound):
                report.failure(f"{path.name}: {fault}")
    if budget.allows(f"{path.name}: decode steps"):
        _time(path, device, 8 if arguments.small else NUM_STEPS, report)
    return report.finish([])


def model_faults(path: Path, device: torch.device, dtype: str, bound: float) -> Iterator[str]:
    """Yields where logits differ from the CPU's by more than `bound` of the largest. Prints the distances."""
    expected = _scores(path, torch.device("cpu"), dtype)
    for mode, scores in _scores(path, device, dtype).items():
        difference = expected["mixed, eager" if mode.startswith("mixed") else "eager"].difference(scores)
        print(f"{dtype}, {mode}: {difference:.2e} of the largest logit apart, {bound:.0e} allowed", flush=True)
        if not difference <= bound:
            yield f"{dtype}, {mode}: logits are {difference:.2e} of the largest from the CPU's, allowed {bound:.0e}"


def _driver(path: Path, device: torch.device, dtype: str, max_new_tokens: int) -> Driver:
    model = load_model(path, dtype=dtype, device=device)
    prompts = [[(7 * step + 31 * index) % 400 + 1 for step in range(PROMPT_LEN)] for index in range(NUM_REQS)]
    return Driver(model, prompts, max_new_tokens, device)


def _scores(path: Path, device: torch.device, dtype: str) -> dict[str, Scores]:
    """Of eager steps, and of graphs that have a request of padding; behind prompts of other steps, and mixed ones."""
    driver = _driver(path, device, dtype, 2 * NUM_SCORED_STEPS)
    driver.prefill()
    found = {"eager": driver.scores(NUM_REQS, NUM_SCORED_STEPS)}
    found["mixed, eager"] = driver.mixed_scores(NUM_REQS, NUM_SCORED_STEPS)
    driver.capture_graphs([NUM_REQS], with_prompts=[PROMPT_LEN + NUM_REQS])
    found["mixed, graphs"] = driver.mixed_scores(NUM_REQS, NUM_SCORED_STEPS)
    driver.prefill()
    found["graphs"] = driver.scores(NUM_REQS, NUM_SCORED_STEPS)
    found["graphs, padded"] = driver.scores(NUM_REQS - 1, NUM_SCORED_STEPS)
    return found


def _time(path: Path, device: torch.device, num_steps: int, report: Report) -> None:
    driver = _driver(path, device, "bfloat16", num_steps + 32)
    rate = driver.prefill()
    driver.capture_graphs([1, NUM_REQS])
    for size in (1, NUM_REQS):
        decoded = driver.decode(size, num_steps, 2)
        report.row(
            f"{path.name:24}{size:>4} graphs, depth 2: {decoded.step_seconds * 1e3:.3f} ms a step, "
            f"{decoded.tokens_per_second:.0f} tokens/s; prefill {rate:.0f} tokens/s",
            model=path.name,
            batch=size,
            step_seconds=decoded.step_seconds,
            tokens_per_second=decoded.tokens_per_second,
            prefill_tokens_per_second=rate,
        )


if __name__ == "__main__":
    sys.exit(main())
