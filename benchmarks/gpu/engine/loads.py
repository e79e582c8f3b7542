"""Steps that are not all alike: `python -m benchmarks.gpu.engine.loads [--model llama-3.1-8b]`.

With random weights: the time to the first token of one prompt; decode steps with sampling compared with greedy ones;
decode steps beside a prompt that is computed in chunks; and a mixed load, in which every few steps a request ends and a
prompt takes its place. Steps with prompts run eagerly, then by graphs. Two steps are in flight, as the scheduler has
them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.engine.models import MODELS, SMALL_MODEL, BenchModel
from benchmarks.gpu.engine.steps import BLOCK_SIZE, WARM_UP_STEPS, Driver
from benchmarks.gpu.report import RESULTS, Budget, Report
from pagewire.config.sampling_params import with_defaults
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.step.step import NewRequest, StepOutput
from pagewire.tools.bench.report import percentile
from pagewire.v1.common_pb2 import SamplingParams

SAMPLED = with_defaults(SamplingParams(temperature=0.8, top_p=0.95, top_k=50, ignore_eos=True, seed=1))
DEPTH = 2


@dataclass(frozen=True)
class Plan:
    """Sizes of a run. chunk: tokens of a prompt beside decodes. turnover: steps between ends of requests."""

    num_reqs: int = 64
    prompt_len: int = 1024
    chunk: int = 512
    turnover: int = 4
    num_steps: int = 64
    dtype: str = "bfloat16"

    @property
    def tokens_of_steps(self) -> tuple[int, ...]:
        """The token counts of steps with prompts."""
        return self.prompt_len, self.num_reqs + self.chunk, self.num_reqs - 1 + self.prompt_len


SMALL_PLAN = Plan(num_reqs=3, prompt_len=40, chunk=8, turnover=2, num_steps=8, dtype="float32")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODELS, help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="a tiny model; its times mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds to stop after (default: %(default)s)")
    arguments = parser.parse_args()
    device, budget = torch.device(arguments.device), Budget(arguments.budget)
    model, plan = (SMALL_MODEL, SMALL_PLAN) if arguments.small else (MODELS[arguments.model], Plan())
    return run(model, plan, device, Report("loads", arguments.out, device, budget), budget)


def run(model: BenchModel, plan: Plan, device: torch.device, report: Report, budget: Budget) -> int:
    with tempfile.TemporaryDirectory() as directory:
        path = model.write(Path(directory))
        loaded = load_model(path, dtype=plan.dtype, device=device, load_format="dummy")
    prompts = model.prompts(plan.num_reqs + 1, plan.prompt_len)
    driver = LoadDriver(loaded, prompts, plan.num_steps + 4 * BLOCK_SIZE, device)
    driver.prefill()
    driver.capture_graphs([plan.num_reqs])

    def row(mode: str, gaps: Sequence[float], beside: float | None = None) -> float:
        median = statistics.median(gaps)
        ratio = f", {median / beside:.2f} times that of decode steps" if beside else ""
        report.row(
            f"{model.name:16}{plan.num_reqs:>5} {mode:28}{median * 1e3:>9.3f} ms median"
            f"{(percentile(gaps, 99) or 0.0) * 1e3:>9.3f} ms p99{ratio}",
            model=model.name, mode=mode, batch=plan.num_reqs, median_seconds=median, p99_seconds=percentile(gaps, 99),
        )  # fmt: skip
        return median

    greedy = row("decode, greedy", driver.decode(plan.num_reqs, plan.num_steps, DEPTH).gaps)
    if budget.allows("sampled"):
        row("decode, sampled", driver.decode(plan.num_reqs, plan.num_steps, DEPTH, sampling=SAMPLED).gaps, greedy)
    for mode in ("eager", "graphs"):
        if mode == "graphs":
            driver.capture_graphs([plan.num_reqs], with_prompts=plan.tokens_of_steps)
        if budget.allows(f"first token, {mode}"):
            row(f"first token of {plan.prompt_len}, {mode}", driver.first_token_seconds())
        if budget.allows(f"decode beside prefill, {mode}"):
            row(f"beside prefill by {plan.chunk}, {mode}", driver.beside_prefill(plan), greedy)
        if budget.allows(f"mixed load, {mode}"):
            row(f"mixed, 1 new in {plan.turnover}, {mode}", driver.mixed(plan), greedy)
    return report.finish([])


class LoadDriver(Driver):
    """A driver with a guest: the last prompt, which runs beside the others."""

    def first_token_seconds(self, times: int = 7) -> list[float]:
        seconds = []
        for _ in range(times):
            self.runner.reset()
            request = self._request(0, self.prompt_len(0), computed=0)
            started = time.perf_counter()
            self._run([0], np.array([self.prompt_len(0)]), [request]).wait()
            seconds.append(time.perf_counter() - started)
        return seconds[2:]  # the first ones compile

    def beside_prefill(self, plan: Plan) -> list[float]:
        """Seconds between steps, each with a token of every request and a chunk of the prompt that came later."""
        return self._gaps(self._chunk_steps(plan))

    def mixed(self, plan: Plan) -> list[float]:
        """Seconds between steps; every `turnover` of them one request ends and its place is taken by a prompt."""
        return self._gaps(self._turnover_steps(plan))

    def _chunk_steps(self, plan: Plan) -> Iterator[StepOutput]:
        self.runner.reset()
        hosts, guest = self._hosts(plan), plan.num_reqs
        num_tokens = np.array([1] * plan.num_reqs + [plan.chunk])
        for index in range(WARM_UP_STEPS + plan.num_steps):
            enters = index * plan.chunk % plan.prompt_len == 0
            new = hosts if index == 0 else []
            new = [*new, self._request(guest, plan.prompt_len, computed=0)] if enters else new
            left = [guest] if enters and index else []
            yield self._run([*range(plan.num_reqs), guest], num_tokens, new, finished=left)

    def _turnover_steps(self, plan: Plan) -> Iterator[StepOutput]:
        self.runner.reset()
        hosts = self._hosts(plan)
        for index in range(WARM_UP_STEPS + plan.num_steps):
            num_tokens, new, left = np.ones(plan.num_reqs, dtype=np.int64), hosts if index == 0 else [], list[int]()
            if index and index % plan.turnover == 0:
                place = index // plan.turnover % plan.num_reqs
                num_tokens[place] = plan.prompt_len
                new, left = [self._request(place, plan.prompt_len, computed=0)], [place]
            yield self._run(list(range(plan.num_reqs)), num_tokens, new, finished=left)

    def _hosts(self, plan: Plan) -> list[NewRequest]:
        return [self._request(index, plan.prompt_len, plan.prompt_len - 1) for index in range(plan.num_reqs)]

    def _gaps(self, steps: Iterator[StepOutput]) -> list[float]:
        running, times = deque[StepOutput](), list[float]()
        for output in steps:
            running.append(output)
            if len(running) == DEPTH:
                running.popleft().wait()
                times.append(time.perf_counter())
        running.popleft().wait()
        return [later - earlier for earlier, later in itertools.pairwise(times[WARM_UP_STEPS - 1 :])]


if __name__ == "__main__":
    sys.exit(main())
