"""The real scheduler and model runner, step by step, with layers that keep different things."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from pagewire.config import SchedulerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.device.memory import OutOfMemoryError
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service.convert import (
    describe_response,
    first_weights,
    result_to_proto,
    step_from_proto,
)
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step
from pagewire.services.scheduler.compose import make_scheduler
from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.placement.integrity import check_integrity
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import StepResult
from pagewire.v1.common_pb2 import Logprobs, SamplingParams
from tests.services.executor.helpers.stepping import CPU, prompt
from tests.services.executor.models.toy import TOY, WINDOW, ToyModel, write_toy

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=96, block_size=4)
GREEDY = resolve(SamplingParams(temperature=0, ignore_eos=True, max_tokens=10))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyModel:
    monkeypatch.setitem(ARCHITECTURES, TOY.name, TOY)
    model = load_model(
        write_toy(tmp_path, ("full", "window", "full")), dtype="float32", device=CPU, load_format="dummy"
    )
    assert isinstance(model, ToyModel)
    generator = torch.Generator().manual_seed(1)
    for name, target in model.load_targets().items():
        if not name.endswith("norm.weight"):
            target.normal_(0.0, 0.5, generator=generator)
    return model


class Line:
    """A scheduler and a runner, with two steps in flight."""

    def __init__(self, runner: ModelRunner, prepare: Callable[[Step], Step] = lambda step: step) -> None:
        """prepare: what becomes of a step before it is executed."""
        self._prepare = prepare
        self.logprobs: dict[int, list[Logprobs]] = {}  # by request id
        self.scheduler = make_scheduler(SchedulerConfig(pipeline_depth=2))
        (self.replica,) = self.scheduler.replicas
        self._runner = runner
        self._in_flight: deque[StepResult] = deque()
        self.attach()

    def attach(self) -> None:
        runner, limits = self._runner, self._runner.limits
        rows = (limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens)
        config = runner.model.config
        model = ("toy", limits.max_model_len, config.vocab_size, config.eos_token_ids, runner.kv_groups)
        info = ExecutorInfo(1, *model, *rows, "cpu", "float32", 1, 1)
        info = replace(info, max_draft_tokens=runner.max_draft_tokens)
        self.scheduler.attach(self.replica, convert.to_executor_info(describe_response(info, first_weights(info))))

    def die(self) -> None:
        """The executor loses everything, steps in flight included, and comes back."""
        assert not self.scheduler.detach(self.replica)
        self._in_flight.clear()
        self._runner.reset()
        for cache in self._runner.kv_caches:
            cache.fill_(torch.nan)
        self.attach()

    def generate(
        self,
        prompts: Sequence[list[int]],
        happening: Callable[[int, Sequence[Request]], None] = lambda step, requests: None,
    ) -> list[list[int]]:
        """Runs requests to their ends. happening(step, requests): what happens before this step's result arrives."""
        return self.run([Request(100 + index, ids, GREEDY) for index, ids in enumerate(prompts)], happening)

    def run(
        self,
        requests: Sequence[Request],
        happening: Callable[[int, Sequence[Request]], None] = lambda step, requests: None,
    ) -> list[list[int]]:
        for request in requests:
            self.scheduler.add_request(request)
        for number in count():
            while (step := self.scheduler.schedule(self.replica)) is not None:
                self._in_flight.append(self._execute(step))
                check_integrity(self.scheduler)
            happening(number, requests)
            if self._in_flight:
                self._keep_logprobs(self.scheduler.update(self.replica, self._in_flight.popleft()))
            elif all(request.is_finished for request in requests):
                break
        return [request.token_ids[request.num_prompt_tokens :] for request in requests]

    def _keep_logprobs(self, outputs: Outputs) -> None:
        for index, lines in outputs.logprobs.items():
            kept = self.logprobs.setdefault(outputs.requests[index].request_id, [])
            kept.append(convert.first_logprobs(lines, outputs.num_tokens[index]))

    def _execute(self, step: convert.ScheduledStep) -> StepResult:
        output = self._runner.execute(self._prepare(step_from_proto(convert.from_step(step))))
        return convert.to_step_result(result_to_proto(output, output.wait(), 1, 1, None))


def expected(model: ToyModel, token_ids: list[int]) -> list[int]:
    token_ids = list(token_ids)
    for _ in range(10):
        token_ids.append(int(model.dense_logits(token_ids)[-1].argmax()))
    return token_ids[-10:]


def test_windows_free_blocks_that_are_not_read_again(model: ToyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of up to 70 tokens over six blocks of four for the window, which alone would hold 24."""
    monkeypatch.setattr(kv_cache, "_useful_blocks", lambda window, limits: 6)
    runner = assemble(model, LIMITS, 40, CPU)
    assert [(group.num_blocks, group.window) for group in runner.kv_groups] == [(40, 0), (6, WINDOW)]
    for cache in runner.kv_caches:
        cache.fill_(torch.nan)  # reading what was never written shows
    line = Line(runner)
    prompts = [prompt(length, seed=length) for length in (60, 3, 17, 8, 41, 5)]
    answers = [expected(model, token_ids) for token_ids in prompts]
    assert line.generate(prompts) == answers
    assert line.replica.kv.num_free_blocks == 46


def test_a_prefix_hit_needs_only_the_end_of_a_window(model: ToyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_useful_blocks", lambda window, limits: 6)
    line = Line(assemble(model, LIMITS, 40, CPU))
    (answer,) = line.generate([prompt(60)])
    follow_up = prompt(60) + answer + [9, 9, 9]
    assert line.generate([follow_up]) == [expected(model, follow_up)]
    assert line.replica.counts.num_prefix_hits == 68, "all full blocks of 69 tokens that were computed"


def test_memory_is_for_those_that_see_all_tokens_beyond_what_windows_can_use(model: ToyModel) -> None:
    page = {0: 4 * 2 * 1 * 16 * 4 * 2, WINDOW: 4 * 2 * 2 * 8 * 4}  # tokens, keys and values, heads, size, bytes, layers
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=96, block_size=4)
    useful = 2 * (2 * 3 + 2)
    for num_blocks in (24, 100):
        assert [group.num_blocks for group in kv_cache.kv_groups(model, num_blocks, limits)] == [num_blocks, useful]
        num_bytes = num_blocks * page[0] + useful * page[WINDOW]
        assert kv_cache.cache_bytes(model, num_blocks, limits) == num_bytes
        assert kv_cache.blocks_within(num_bytes + page[0] - 1, model, limits, "--flag") == num_blocks
    with pytest.raises(OutOfMemoryError, match=r"would be .*, 92 tokens, but one request of 96 tokens needs"):
        kv_cache.blocks_within(24 * page[0] + useful * page[WINDOW] - 1, model, limits, "--flag")
    assert kv_cache.longest_request(kv_cache.kv_groups(model, 12, limits), limits) == 48
