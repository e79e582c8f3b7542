"""Measures speculative decoding: `python -m benchmarks.gpu.speculation [--models llama-3.1-8b] [--drafts 5]`.

First, for each method, tokens with drafts must equal those without: greedily in fp32, with a small model, through
graphs, two steps in flight. Then, per model with random weights: the time of steps that check drafts, by their number,
and the additional time of drafting, by method. Random weights accept almost no draft, so the table gives the rates if
none and if all were accepted; `pagewire bench spec` measures real texts. benchmarks/README.md describes the table.
`--device cpu --small` tests the script without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.drafting import METHODS, Drafted, DraftingDriver, proposer_of
from benchmarks.gpu.engine.models import MODELS, SMALL_MODEL, BenchModel
from benchmarks.gpu.engine.steps import BLOCK_SIZE, WARM_UP_STEPS
from benchmarks.gpu.report import RESULTS, Budget, Report
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model

DEPTH = 2
MODEL_SECONDS = 120.0  # of --budget
# The model that drafts has so many layers less.
SMALLER = 8
HEADER = f"{'model':18}{'batch':>6} {'step':26}{'ms':>9}{'x plain':>9}{'tok/s, none right':>19}{'all right':>11}"


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    batch_sizes: tuple[int, ...] = (1, 8, 64)
    context_len: int = 1024
    num_steps: int = 32
    dtype: str = "bfloat16"


SMALL_PLAN = Plan(batch_sizes=(1, 3), context_len=24, num_steps=4, dtype="float32")
CHECKED_STEPS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"comma separated, of: {', '.join(MODELS)} (default: %(default)s)"
    parser.add_argument("--models", default="llama-3.1-8b", help=names)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma separated (default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=5, help="most of a request in a step (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model; its times mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=510.0, help="seconds to stop after (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := set(arguments.models.split(",")) - set(MODELS):
        parser.error(f"--models: no {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    methods = arguments.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        parser.error(f"--methods: no {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    if not 1 <= arguments.drafts <= 16:
        parser.error(f"--drafts {arguments.drafts}: a step has 1 to 16 drafts of a request")
    device, budget = torch.device(arguments.device), Budget(arguments.budget)
    report = Report("speculation", arguments.out, device, budget)
    bench = Bench(device, SMALL_PLAN if arguments.small else Plan(), arguments.drafts, report)
    bench.check(methods)
    models = [SMALL_MODEL] if arguments.small else [MODELS[name] for name in arguments.models.split(",")]
    for model in models:
        if budget.allows(model.name, MODEL_SECONDS if device.type == "cuda" else 0.0):
            bench.run(model, methods)
    return report.finish([])


class Bench:
    """One run."""

    def __init__(self, device: torch.device, plan: Plan, num_drafts: int, report: Report) -> None:
        self._device, self._plan, self._num_drafts, self._report = device, plan, num_drafts, report

    def check(self, methods: list[str]) -> None:
        """Each method's tokens against those without drafts, with different numbers of drafts side by side."""
        counts = [self._num_drafts, 0, max(1, self._num_drafts // 2)]
        most = 1 + (WARM_UP_STEPS + CHECKED_STEPS + DEPTH) * (1 + self._num_drafts)
        with tempfile.TemporaryDirectory() as directory:
            path = SMALL_MODEL.write(Path(directory))

            def load() -> Model:
                return load_model(path, dtype="float32", device=self._device, load_format="dummy")

            prompts = [prompt * 3 for prompt in SMALL_MODEL.prompts(len(counts), 9)]  # n-grams are found
            plain = DraftingDriver(load(), prompts, most, self._device)
            plain.prefill()
            expected = plain.drafted([0] * 3, most - 1 - WARM_UP_STEPS, DEPTH)
            for method in methods:
                with self._kept(f"{method}: exactness"):
                    driver = DraftingDriver(
                        load(), prompts, most, self._device, proposer_of(method, self._num_drafts, load)
                    )
                    driver.prefill()
                    driver.capture_graphs([1, 2, 3])
                    self._compare(method, driver.drafted(counts, CHECKED_STEPS, DEPTH), expected)

    def _compare(self, method: str, drafted: Drafted, expected: Drafted) -> None:
        for mine, plain in zip(drafted.token_ids, expected.token_ids, strict=True):
            if mine != plain[: len(mine)]:
                place = next(i for i, (a, b) in enumerate(zip(mine, plain, strict=False)) if a != b)
                self._report.failure(f"{method}: in fp32, token {place} differs from that without drafts")
                return
        self._report.row(
            f"{'exactness':18}{len(drafted.token_ids):>6} {method}: as without, {drafted.gained:.2f} tokens a step",
            method=method,
            mode="exactness",
            gained=drafted.gained,
        )

    def run(self, model: BenchModel, methods: list[str]) -> None:
        print(HEADER, flush=True)
        with tempfile.TemporaryDirectory() as directory:
            path = model.write(Path(directory) / "target")
            layers = max(2, model.config["num_hidden_layers"] // SMALLER)
            smaller = replace(model, config=model.config | {"num_hidden_layers": layers})
            small = smaller.write(Path(directory) / "drafter")
            plain: dict[int, float] = {}
            # N-grams take no model, so that steps with them tell what checking costs.
            for method in sorted(methods, key=lambda name: name != "ngram"):
                with self._kept(f"{model.name}, {method}"):
                    self._measure(model, method, lambda: self._load(path), lambda: self._load(small), plain)
                gc.collect()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()

    def _measure(
        self,
        model: BenchModel,
        method: str,
        load: Callable[[], Model],
        load_small: Callable[[], Model],
        plain: dict[int, float],
    ) -> None:
        """Steps of every number of drafts with n-grams, of the most and of half with others. plain: seconds of a step
        without, by requests."""
        plan, most = self._plan, self._num_drafts
        steps = WARM_UP_STEPS + plan.num_steps + DEPTH
        prompts = model.prompts(max(plan.batch_sizes), plan.context_len)
        make = proposer_of(method, most, load_small)
        driver = DraftingDriver(load(), prompts, steps * (1 + most) + BLOCK_SIZE, self._device, make)
        driver.prefill()
        driver.capture_graphs(plan.batch_sizes)
        for size in plan.batch_sizes:
            if size not in plain:
                plain[size] = driver.drafted([0] * size, plan.num_steps, DEPTH).step_seconds
                self._row(model, size, "plain", 0, plain[size], plain[size])
            for count in range(1, most + 1) if method == "ngram" else sorted({max(1, most // 2), most}):
                drafted = driver.drafted([count] * size, plan.num_steps, DEPTH, is_fixed=True)
                self._row(model, size, method, count, drafted.step_seconds, plain[size])

    def _row(self, model: BenchModel, size: int, method: str, count: int, seconds: float, plain: float) -> None:
        name = f"{method}, {count} drafts" if count else method
        self._report.row(
            f"{model.name:18}{size:>6} {name:26}{seconds * 1e3:>9.3f}{seconds / plain:>9.2f}"
            f"{size / seconds:>19.0f}{size * (1 + count) / seconds:>11.0f}",
            model=model.name,
            mode="step",
            method=method,
            batch=size,
            drafts=count,
            step_seconds=seconds,
            of_plain=seconds / plain,
        )

    def _load(self, path: Path) -> Model:
        return load_model(path, dtype=self._plan.dtype, device=self._device, load_format="dummy")

    @contextmanager
    def _kept(self, what: str) -> Iterator[None]:
        """Whatever is raised within is a failure of the run: the rest is still worth having."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._report.failure(f"{what}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
