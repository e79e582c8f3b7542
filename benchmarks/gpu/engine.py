"""Tokens per second of whole decode steps: `python -m benchmarks.gpu.engine [--models llama-3.1-8b]`.

Per model, with random weights, at 1k tokens of context: the executor alone (eager steps, CUDA graphs, one or two steps
in flight, fp8 KV, the device's idle time), each beside the roofline computed from ceilings measured here; then the same
model behind all services. benchmarks/README.md says how to read the table. `--model PATH` also compares a real model's
greedy tokens with the CPU's. `--device cpu --small` proves the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import kernels  # noqa: F401  (registers the ops)
from benchmarks.gpu import whole_line
from benchmarks.gpu.engine_models import MODELS, SMALL_MODEL, BenchModel
from benchmarks.gpu.engine_steps import BLOCK_SIZE, Decoded, Driver
from benchmarks.gpu.measure import Ceilings, measure_ceilings
from benchmarks.gpu.report import RESULTS, Budget, Report, verdict
from pagewire.models import resolve_model
from services.executor.loader import Model, load_model

FP8_MODEL = "llama-3.1-8b"
LINE_TARGET = 0.95
MAX_IDLE_SECONDS, MAX_IDLE_SHARE = 50e-6, 0.02


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
    def max_new_tokens(self) -> int:
        return self.line_tokens + self.num_steps + 2 * BLOCK_SIZE


SMALL_PLAN = Plan(
    batch_sizes=(1, 3), line_batch_sizes=(3,), context_len=40, num_steps=6, num_eager_steps=4, line_tokens=24,
    dtype="float32",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma separated (default: %(default)s)")
    parser.add_argument("--model", help="a real model, small, whose greedy tokens are compared with the CPU's")
    parser.add_argument("--only", default="steps,line", help="steps (the executor alone), line, or both (default)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model, whose times mean nothing")
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
    models = [SMALL_MODEL] if arguments.small else [MODELS[name] for name in arguments.models.split(",")]
    for model in models:
        bench.run(model, arguments.only.split(","))
    return bench.finish()


class Bench:
    """One run over several models."""

    def __init__(self, device: torch.device, small: bool, report: Report, budget: Budget) -> None:
        self._device = device
        self._plan = SMALL_PLAN if small else Plan()
        self._judge = not small
        self._report = report
        self._budget = budget
        self._verdicts: Counter[str] = Counter()
        self._ceilings: Ceilings = measure_ceilings(device, small)
        report.note(
            "ceilings",
            self._ceilings.__dict__,
            f"ceilings: copy {self._ceilings.copy / 1e12:.3f} TB/s (read + written), "
            f"bf16 matmul {self._ceilings.matmul / 1e12:.1f} TFLOP/s",
        )
        print(
            f"{'model':14}{'batch':>6} {'mode':22}{'ms/step':>9}{'roofline':>9}{'share':>7}{'tok/s':>9}"
            f"{'ITL p50':>9}{'p99 ms':>8}  targets",
            flush=True,
        )

    def finish(self) -> int:
        counts = ", ".join(f"{count} {text}" for text, count in sorted(self._verdicts.items()))
        return self._report.finish([f"targets: {counts or 'none'}"])

    def run(self, model: BenchModel, parts: list[str]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = model.write(Path(directory))
            alone: dict[int, list[Decoded]] = {}
            if self._budget.allows(f"{model.name}: the executor alone", 20.0):
                alone = self._steps(model, path, brief="steps" not in parts)
            _free(self._device)
            if "line" in parts and self._budget.allows(f"{model.name}: the whole line", 60.0):
                self._line(model, path, alone)

    def _steps(self, model: BenchModel, path: Path, brief: bool) -> dict[int, list[Decoded]]:
        """The executor alone; by batch size, its best mode at two lengths of context. brief: no more than those."""
        plan = self._plan
        loaded = load_model(path, dtype=plan.dtype, device=self._device, load_format="dummy")
        batch_sizes = [size for size in plan.batch_sizes if self._fits(model, size, loaded)]
        if not batch_sizes:
            return {}
        driver = Driver(
            loaded, model.prompts(max(batch_sizes), plan.context_len), plan.max_new_tokens, self._device
        )  # fmt: skip
        self._prefill(model, driver)
        eager: dict[int, Decoded] = {}
        if not brief:
            for size in batch_sizes:
                eager[size] = driver.decode(size, plan.num_eager_steps, 2)
                self._row(model, eager[size], "eager, depth 2")
        tokens = driver.generate(batch_sizes[-2], plan.num_eager_steps) if len(batch_sizes) > 1 else None
        driver.capture_graphs(batch_sizes)
        if tokens is not None:
            self._compare_graphs(model, driver, tokens)
        alone = {}
        for size in batch_sizes:
            best = self._graph_modes(model, driver, size, eager.get(size))
            late = driver.decode(size, plan.num_steps, 2, context_len=plan.context_len + plan.line_tokens)
            alone[size] = [best, late]
        del driver, loaded
        _free(self._device)
        if model.name in (FP8_MODEL, SMALL_MODEL.name) and not brief:
            self._fp8(model, path, batch_sizes[-2:], alone)
        return alone

    def _fits(self, model: BenchModel, size: int, loaded: Model) -> bool:
        if self._device.type == "cpu":
            return True
        needed = size * (self._plan.context_len + self._plan.max_new_tokens) * model.kv_bytes_per_token(2)
        free = 0.9 * torch.cuda.mem_get_info()[0]
        if needed > free:
            self._budget.left_out.append(f"{model.name} at {size}: {needed / 1e9:.0f} GB of KV, {free / 1e9:.0f} free")
        return needed <= free

    def _prefill(self, model: BenchModel, driver: Driver) -> None:
        rate = driver.prefill()
        flops = 2 * model.num_weights * rate
        self._report.row(
            f"{model.name:14}{'':>6} prefill: {rate:.0f} tokens/s, {flops / self._ceilings.matmul:.2f} of the matrix "
            "product's rate (weights alone)",
            model=model.name,
            mode="prefill",
            tokens_per_second=rate,
        )

    def _compare_graphs(self, model: BenchModel, driver: Driver, eager: np.ndarray) -> None:
        num_tokens, num_reqs = eager.shape
        graphs = driver.generate(num_reqs, num_tokens)
        if not np.array_equal(eager, graphs):
            share = float((eager == graphs).mean())
            self._report.failure(
                f"{model.name}: greedy tokens of graphs are not those of eager steps ({share:.3f} are)"
            )

    def _graph_modes(self, model: BenchModel, driver: Driver, size: int, eager: Decoded | None) -> Decoded:
        """Graphs at both depths and the device's idle time; depth 2's result."""
        steps = self._plan.num_steps
        one, two = driver.decode(size, steps, 1), driver.decode(size, steps, 2)
        self._row(model, one, "graphs, depth 1")
        judged = ""
        if self._judge and model.targets is not None:
            targets = model.targets
            share = self._share(model, two)
            judged += self._judge_ratio("roofline", share, targets.must.get(size), targets.stretch.get(size))
            if eager is not None and size == 1:
                faster = eager.step_seconds / two.step_seconds
                judged += self._judge_ratio("over eager", faster, targets.graphs_over_eager)
            faster = one.step_seconds / two.step_seconds
            judged += self._judge_ratio("over depth 1", faster, targets.depth_2_over_1.get(size))
        self._row(model, two, "graphs, depth 2", judged)
        if self._device.type == "cuda":
            self._idle(model, driver, two)
        return two

    def _idle(self, model: BenchModel, driver: Driver, decoded: Decoded) -> None:
        idle, longest = driver.idle_seconds(decoded.num_reqs, 2)
        allowed = max(MAX_IDLE_SECONDS, MAX_IDLE_SHARE * decoded.step_seconds)
        judged = self._judge_ratio("idle", allowed / max(longest, 1e-9), 1.0) if self._judge else ""
        self._report.row(
            f"{model.name:14}{decoded.num_reqs:>6} profile: device idle {idle * 1e6:.0f} µs a step, longest gap "
            f"{longest * 1e6:.0f} µs (at most {allowed * 1e6:.0f}){judged}",
            model=model.name,
            mode="idle",
            batch=decoded.num_reqs,
            idle_seconds=idle,
            longest_gap_seconds=longest,
        )

    def _fp8(self, model: BenchModel, path: Path, sizes: list[int], wide: dict[int, list[Decoded]]) -> None:
        loaded = load_model(path, dtype=self._plan.dtype, device=self._device, load_format="dummy", kv_scales=True)
        prompts = model.prompts(max(sizes), self._plan.context_len)
        driver = Driver(loaded, prompts, self._plan.max_new_tokens, self._device, torch.float8_e4m3fn)
        driver.prefill()
        driver.capture_graphs(sizes)
        for size in sizes:
            decoded = driver.decode(size, self._plan.num_steps, 2)
            faster = wide[size][0].step_seconds / decoded.step_seconds
            self._row(
                model, decoded, "graphs, depth 2, fp8", f"  {faster:.2f}x the 16-bit cache's speed", kv_itemsize=1
            )

    def _line(self, model: BenchModel, path: Path, alone: dict[int, list[Decoded]]) -> None:
        """The same model behind the services, at token level and as text, beside the executor alone."""
        sizes = [size for size in self._plan.line_batch_sizes if size in alone]
        if not sizes:
            return
        try:
            with self._serving(model, path, max(sizes)) as line:
                for size in sizes:
                    for name, drive in whole_line.CLIENTS.items():
                        arrivals = drive(line, model.prompts(size, self._plan.context_len), self._plan.line_tokens)
                        self._line_row(model, name, size, arrivals, alone[size])
        except whole_line.LineError as error:
            self._report.failure(f"{model.name}: the whole line: {error}")

    @contextmanager
    def _serving(self, model: BenchModel, path: Path, max_num_seqs: int) -> Iterator[whole_line.Line]:
        plan = self._plan
        max_model_len = plan.context_len + plan.line_tokens + BLOCK_SIZE
        kv_bytes = (max_num_seqs + 1) * max_model_len * model.kv_bytes_per_token(4 if plan.dtype == "float32" else 2)
        flags = {
            "device": self._device.type,
            "dtype": plan.dtype,
            "max-model-len": max_model_len,
            "max-num-seqs": max_num_seqs,
            "kv-cache-memory-bytes": kv_bytes,
            "cudagraph-capture-sizes": ",".join(map(str, plan.line_batch_sizes)),
        }
        with whole_line.serving(path, flags) as line:
            yield line

    def _line_row(
        self, model: BenchModel, name: str, size: int, arrivals: whole_line.Arrivals, alone: list[Decoded]
    ) -> None:
        early, late = alone
        context_len = self._plan.context_len + arrivals.mean_tokens
        # The executor alone at the context that the streams had: between two measurements of it.
        share = (context_len - early.context_len) / (late.context_len - early.context_len)
        seconds = early.step_seconds + share * (late.step_seconds - early.step_seconds)
        ratio = arrivals.tokens_per_second * seconds / size
        judged = (
            self._judge_ratio("of the executor alone", ratio, LINE_TARGET) if self._judge else f"  {ratio:.2f} of it"
        )
        p50, p99 = arrivals.gap(50), arrivals.gap(99)
        self._report.row(
            f"{model.name:14}{size:>6} {'whole line, ' + name:22}{size / arrivals.tokens_per_second * 1e3:>9.3f}"
            f"{'':>16}{arrivals.tokens_per_second:>9.0f}{p50 * 1e3:>9.2f}{p99 * 1e3:>8.2f}{judged}",
            model=model.name,
            mode=f"line, {name}",
            batch=size,
            context_len=context_len,
            tokens_per_second=arrivals.tokens_per_second,
            of_executor_alone=ratio,
            itl_p50_seconds=p50,
            itl_p99_seconds=p99,
            window_seconds=arrivals.window_seconds,
        )

    def _share(self, model: BenchModel, decoded: Decoded, kv_itemsize: int | None = None) -> float:
        return self._roofline(model, decoded, kv_itemsize) / decoded.step_seconds

    def _roofline(self, model: BenchModel, decoded: Decoded, kv_itemsize: int | None) -> float:
        itemsize = 4 if self._plan.dtype == "float32" else 2
        return model.roofline_seconds(
            self._ceilings, decoded.num_reqs, decoded.context_len, itemsize, kv_itemsize or itemsize
        )

    def _judge_ratio(self, name: str, value: float, must: float | None, stretch: float | None = None) -> str:
        text = verdict(value, must, stretch)
        if text == "-":
            return ""
        self._verdicts[text] += 1
        return f"  {name} {value:.2f}:{text}"

    def _row(
        self, model: BenchModel, decoded: Decoded, mode: str, judged: str = "", kv_itemsize: int | None = None
    ) -> None:
        roofline = self._roofline(model, decoded, kv_itemsize)
        self._report.row(
            f"{model.name:14}{decoded.num_reqs:>6} {mode:22}{decoded.step_seconds * 1e3:>9.3f}{roofline * 1e3:>9.3f}"
            f"{roofline / decoded.step_seconds:>7.2f}{decoded.tokens_per_second:>9.0f}{decoded.gap(50) * 1e3:>9.2f}"
            f"{decoded.gap(99) * 1e3:>8.2f}{judged}",
            model=model.name,
            mode=mode,
            batch=decoded.num_reqs,
            context_len=decoded.context_len,
            step_seconds=decoded.step_seconds,
            roofline_seconds=roofline,
            tokens_per_second=decoded.tokens_per_second,
            itl_p50_seconds=decoded.gap(50),
            itl_p99_seconds=decoded.gap(99),
            judged=judged.strip(),
        )

    def compare_with_cpu(self, path: str) -> None:
        """A real model's greedy tokens in fp32: eager steps and graphs on the device against the CPU's."""
        prompts = [list(range(100, 400, 3)), list(range(500, 560)), [7] * 33, [11] * 5]
        runs = {}
        for device in (torch.device("cpu"), self._device):
            loaded = load_model(path, dtype="float32", device=device)
            driver = Driver(loaded, prompts, 64, device)
            runs[f"{device.type} eager"] = driver.generate(3, 32)
            driver.capture_graphs([4])  # three requests and one of padding
            runs[f"{device.type} graphs"] = driver.generate(3, 32)
        expected = runs["cpu eager"]
        for name, tokens in runs.items():
            if not np.array_equal(tokens, expected):
                self._report.failure(f"{Path(path).name}: fp32 greedy tokens, {name}: not those of the CPU")
        self._report.note("greedy_compared", list(runs), f"fp32 greedy tokens compared: {', '.join(runs)}")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
