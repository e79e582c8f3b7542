"""Tokens per second of whole decode steps: `python -m benchmarks.gpu.engine [--models llama-3.1-8b,llama-3.1-8b-int4]`.

Per model, with random weights, at 1k tokens of context: the executor alone (eager steps, CUDA graphs, one or two steps
in flight, fp8 KV, the device's idle time), each beside the roofline computed from ceilings measured here; then the same
model behind all services. benchmarks/README.md says how to read the table. `--model PATH` also compares a real model's
greedy tokens with the CPU's. `--device cpu --small` proves the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.engine import whole_line
from benchmarks.gpu.engine.models import DENSE_MODELS, MODELS, SMALL_INT4_MODEL, SMALL_MODEL, BenchModel
from benchmarks.gpu.engine.steps import BLOCK_SIZE, Decoded, Driver, Scores
from benchmarks.gpu.engine.table import EngineTable
from benchmarks.gpu.measure import measure_ceilings
from benchmarks.gpu.report import RESULTS, Budget, Report
from pagewire.files.models import resolve_model
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model

FP8_MODEL = "llama-3.1-8b"
# About what a model takes of --budget.
EXECUTOR_SECONDS, LINE_SECONDS = 40.0, 80.0
# Between eager steps and graphs, of the largest logit
LOGIT_BOUNDS = {"float32": 1e-3, "bfloat16": 3e-2}
NUM_SCORED_STEPS = 16
QUANTIZED_SECONDS = 20.0  # more, to make and pack weights


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    batch_sizes: tuple[int, ...] = (1, 8, 64, 256)
    line_batch_sizes: tuple[int, ...] = (64, 256)
    context_len: int = 1024
    num_steps: int = 96
    num_eager_steps: int = 32
    # Tokens that each stream of the whole line gets: the last ones start while the first ones decode.
    line_tokens: int = 288
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def max_new_tokens(self) -> int:
        return self.line_tokens + self.num_steps + 2 * BLOCK_SIZE


SMALL_PLAN = Plan(
    batch_sizes=(1, 3), line_batch_sizes=(3,), context_len=40, num_steps=6, num_eager_steps=4, line_tokens=400,
    dtype="float32",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"comma separated, of: {', '.join(MODELS)} (default: %(default)s)"
    parser.add_argument("--models", default=",".join(DENSE_MODELS), help=names)
    parser.add_argument("--model", help="a small real model; its greedy tokens are compared with the CPU's")
    parser.add_argument("--only", default="steps,line", help="steps (the executor alone), line, or both (default)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model; its times mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=510.0, help="seconds to stop after (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := set(arguments.models.split(",")) - set(MODELS):
        parser.error(f"--models: no {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if unknown := set(arguments.only.split(",")) - {"steps", "line"}:
        parser.error(f"--only: no {', '.join(sorted(unknown))}; there are steps and line")
    device = torch.device(arguments.device)
    budget = Budget(arguments.budget)
    bench = Bench(device, arguments.small, Report("engine", arguments.out, device, budget), budget)
    if arguments.model:
        bench.compare_with_cpu(str(resolve_model(arguments.model)))
    models = [MODELS[name] for name in arguments.models.split(",")]
    if arguments.small:
        models = [SMALL_MODEL, SMALL_INT4_MODEL]
    for model in models:
        bench.run(model, arguments.only.split(","))
    return bench.finish()


class Bench:
    """One run over several models."""

    def __init__(self, device: torch.device, small: bool, report: Report, budget: Budget) -> None:
        self._device = device
        self._plan = SMALL_PLAN if small else Plan()
        self._report = report
        self._budget = budget
        ceilings = measure_ceilings(device, small)
        report.note(
            "ceilings",
            ceilings.__dict__,
            f"ceilings: copy {ceilings.copy / 1e12:.3f} TB/s (read + written), "
            f"bf16 matmul {ceilings.matmul / 1e12:.1f} TFLOP/s",
        )
        self._table = EngineTable(report, ceilings, self._plan.itemsize, judge=not small)

    def finish(self) -> int:
        return self._report.finish(self._table.summary())

    def run(self, model: BenchModel, parts: list[str]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = model.write(Path(directory))
            alone: dict[int, list[Decoded]] = {}
            try:
                seconds = EXECUTOR_SECONDS + (QUANTIZED_SECONDS if model.dense else 0.0)
                if self._budget.allows(f"{model.name}: the executor alone", seconds):
                    alone = self._executor(model, path, brief="steps" not in parts)
                self._free()
                if "line" in parts and self._budget.allows(f"{model.name}: the whole line", LINE_SECONDS):
                    self._line(model, path, alone)
            # Whatever it is: the other models are still worth having.
            except Exception as error:
                traceback.print_exc()
                self._report.failure(f"{model.name}: {type(error).__name__}: {error}")
        self._free()

    def _executor(self, model: BenchModel, path: Path, brief: bool) -> dict[int, list[Decoded]]:
        """The executor alone; by batch size, its best mode at two lengths of context. brief: no more than those."""
        plan = self._plan
        loaded = self._load(path)
        sizes = [size for size in plan.batch_sizes if self._fits(model, size)]
        if not sizes:
            return {}
        driver = self._driver(model, loaded, max(sizes))
        self._table.prefill(model, driver.prefill())
        eager = {} if brief else {size: driver.decode(size, plan.num_eager_steps, 2) for size in sizes}
        for result in eager.values():
            self._table.decoded(model, result, "eager, depth 2")
        scores = {} if brief else {size: driver.scores(size, NUM_SCORED_STEPS) for size in sizes[:2]}
        driver.capture_graphs(sizes)
        for size, eagerly in scores.items():
            self._compare_scores(model, eagerly, driver.scores(size, NUM_SCORED_STEPS))
        alone = {}
        for size in sizes:
            best = self._graph_modes(model, driver, size, eager.get(size))
            late = driver.decode(size, plan.num_steps, 2, context_len=plan.context_len + plan.line_tokens)
            alone[size] = [best, late]
        del driver, loaded
        self._free()
        if model.name in (FP8_MODEL, SMALL_MODEL.name) and not brief:
            self._fp8(model, path, sizes[-2:], alone)
        return alone

    def _load(self, path: Path, fp8: bool = False) -> Model:
        return load_model(
            path,
            dtype=self._plan.dtype,
            device=self._device,
            load_format="dummy",
            kv_cache_dtype="fp8" if fp8 else "auto",
        )

    def _driver(self, model: BenchModel, loaded: Model, num_reqs: int) -> Driver:
        prompts = model.prompts(num_reqs, self._plan.context_len)
        return Driver(loaded, prompts, self._plan.max_new_tokens, self._device)

    def _fits(self, model: BenchModel, size: int) -> bool:
        if self._device.type == "cpu":
            return True
        plan = self._plan
        needed = size * (plan.context_len + plan.max_new_tokens) * model.kv_bytes_per_token(plan.itemsize)
        free = 0.9 * torch.cuda.mem_get_info()[0]
        if needed > free:
            self._report.note(
                f"{model.name} {size}",
                "too large",
                f"{model.name:18}{size:>6} left out: {needed / 1e9:.0f} GB of KV, {free / 1e9:.0f} GB are free",
            )
        return needed <= free

    def _compare_depths(self, model: BenchModel, one: Decoded, two: Decoded) -> None:
        """Both replay the same graphs over the same prompts: every token must be the same."""
        length = min(len(one.token_ids), len(two.token_ids))
        same = one.token_ids[:length] == two.token_ids[:length]
        if not same.all():
            self._report.failure(
                f"{model.name} at {one.num_reqs}: greedy tokens differ between depth 1 and depth 2 "
                f"({same.mean():.3f} are the same)"
            )

    def _compare_scores(self, model: BenchModel, eager: Scores, graphs: Scores) -> None:
        """Libraries may choose other products for a captured step: logits are the same within rounding only."""
        bound = LOGIT_BOUNDS[self._plan.dtype]
        difference = eager.difference(graphs)
        size = eager.token_ids.shape[1]
        if not difference <= bound:
            self._report.failure(
                f"{model.name} at {size}: logits of graphs and of eager steps differ by {difference:.2e} of the "
                f"largest, allowed {bound:.0e}"
            )
        self._report.note(
            f"{model.name} {size} logits",
            difference,
            f"{model.name:18}{size:>6} logits of graphs and of eager steps: {difference:.1e} of the largest apart",
        )

    def _graph_modes(self, model: BenchModel, driver: Driver, size: int, eager: Decoded | None) -> Decoded:
        """Graphs at both depths and the device's idle time; depth 2's result."""
        one, two = (driver.decode(size, self._plan.num_steps, depth) for depth in (1, 2))
        self._compare_depths(model, one, two)
        self._table.decoded(model, one, "graphs, depth 1")
        self._table.decoded(model, two, "graphs, depth 2", self._table.judge_step(model, two, one, eager))
        if self._device.type == "cuda":
            self._table.idle(model, two, *driver.idle_seconds(size, 2))
        return two

    def _fp8(self, model: BenchModel, path: Path, sizes: list[int], wide: dict[int, list[Decoded]]) -> None:
        driver = self._driver(model, self._load(path, fp8=True), max(sizes))
        driver.prefill()
        driver.capture_graphs(sizes)
        for size in sizes:
            result = driver.decode(size, self._plan.num_steps, 2)
            faster = f"  {wide[size][0].step_seconds / result.step_seconds:.2f}x the speed without"
            self._table.decoded(model, result, "graphs, depth 2, fp8", faster, kv_itemsize=1)

    def _line(self, model: BenchModel, path: Path, alone: dict[int, list[Decoded]]) -> None:
        """The same model behind the services, at token level and as text, beside the executor alone."""
        plan = self._plan
        sizes = [size for size in plan.line_batch_sizes if size in alone]
        if not sizes:
            return
        max_model_len = plan.context_len + plan.line_tokens + BLOCK_SIZE
        flags = {
            "device": self._device.type,
            "dtype": plan.dtype,
            "max-model-len": max_model_len,
            "max-num-seqs": max(sizes),
            "kv-cache-memory-bytes": (max(sizes) + 1) * max_model_len * model.kv_bytes_per_token(plan.itemsize),
            "cudagraph-capture-sizes": ",".join(map(str, sizes)),
        }
        with whole_line.serving(path, flags) as line:
            for size in sizes:
                prompts = model.prompts(size, plan.context_len)
                for name, drive in whole_line.CLIENTS.items():
                    arrivals = drive(line, prompts, plan.line_tokens)
                    context_len = plan.context_len + arrivals.mean_tokens
                    self._table.line(model, name, arrivals, context_len, _between(alone[size], context_len))

    def compare_with_cpu(self, path: str) -> None:
        """A real model's greedy tokens in fp32: eager steps and graphs on the device against the CPU's."""
        prompts = [list(range(100, 400, 3)), list(range(500, 560)), [7] * 33, [11] * 5]
        runs = {}
        for device in (torch.device("cpu"), self._device):
            driver = Driver(load_model(path, dtype="float32", device=device), prompts, 64, device)
            runs[f"{device.type} eager"] = driver.generate(3, 32)
            driver.capture_graphs([4])  # three requests and one of padding
            runs[f"{device.type} graphs"] = driver.generate(3, 32)
        expected = runs["cpu eager"]
        for name, tokens in runs.items():
            if not np.array_equal(tokens, expected):
                self._report.failure(f"{Path(path).name}: fp32 greedy tokens, {name}: not those of the CPU")
        self._report.note("greedy_compared", list(runs), f"fp32 greedy tokens compared: {', '.join(runs)}")

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _between(alone: list[Decoded], context_len: float) -> float:
    """Seconds of a step at this context, on the line through two measurements."""
    early, late = alone
    share = (context_len - early.context_len) / (late.context_len - early.context_len)
    return early.step_seconds + share * (late.step_seconds - early.step_seconds)
