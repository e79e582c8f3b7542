"""Executors with layers in stages of a pipeline: all stages have something to do, whichever requests come and go."""

from itertools import pairwise

import pytest

from pagewire.services.scheduler.values.images import PromptImages
from pagewire.services.scheduler.values.step import StepWork
from tests.fakes import FakeExecutor
from tests.services.scheduler.core.pipeline import LATENCY, Pipeline
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.values.test_images import image


def seconds_of(work: StepWork) -> float:
    return 0.004 + 0.0002 * work.num_decodes + 0.00004 * work.num_prompt_tokens


def plain(pipeline: Pipeline, num_requests: int, max_tokens: int = 400, num_prompt_tokens: int = 20) -> None:
    for i in range(num_requests):
        pipeline.line.add([i % 900] * num_prompt_tokens, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("step_seconds", [0.004, 0.05])
def test_no_stage_idles_where_as_many_decode_as_there_are_stages(num_stages: int, step_seconds: float) -> None:
    """Though each waits for tokens that the last stage samples, and results take time to the scheduler and back."""
    pipeline = Pipeline(num_stages, lambda work: step_seconds)
    plain(pipeline, 8)
    pipeline.run(until=40 * step_seconds)
    idle = pipeline.idle_shares(lambda: pipeline.run(until=300 * step_seconds))
    assert max(idle) < 0.05


def test_a_few_more_than_stages_are_no_fewer_cohorts() -> None:
    """Two, one and one, not two and two."""
    pipeline = Pipeline(3, seconds_of)
    plain(pipeline, 4)
    pipeline.run(until=0.5)
    sizes = [len(step.request_ids) for step in pipeline.steps[-30:]]
    assert {sum(sizes[i : i + 3]) for i in range(28)} == {4} and set(sizes) == {1, 2}


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_cohorts_are_of_equal_size_whichever_requests_come_and_go(num_stages: int) -> None:
    pipeline = Pipeline(num_stages, seconds_of)
    plain(pipeline, 5)
    pipeline.run(until=0.5)
    plain(pipeline, 6)
    pipeline.run(until=1.0)
    for request in pipeline.line.replica.running[::3]:
        pipeline.line.abort(request)
    pipeline.run(until=1.5)
    num_running, last = len(pipeline.line.replica.running), pipeline.steps[-4 * num_stages :]
    assert num_running == 7
    assert {len(step.request_ids) for step in last} <= {num_running // num_stages, -(-num_running // num_stages)}
    per_request = [
        sum(request.request_id in step.request_ids for step in last) for request in pipeline.line.replica.running
    ]
    assert max(per_request) - min(per_request) <= 1, "a request is passed over"


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_lone_request_passes_the_stages_one_after_the_other(num_stages: int) -> None:
    pipeline = Pipeline(num_stages, lambda work: 0.004)
    plain(pipeline, 1, max_tokens=50)
    pipeline.run()
    assert pipeline.step_ends[49] == pytest.approx(50 * (num_stages * 0.004 + 2 * LATENCY), rel=0.02)


def test_the_pieces_of_a_prompt_follow_each_other() -> None:
    pipeline = Pipeline(4, lambda work: 0.02, long_prefill_token_threshold=0, max_num_batched_tokens=100)
    plain(pipeline, 1, max_tokens=1, num_prompt_tokens=4000)
    pipeline.run()
    assert pipeline.now < 1.1 * (40 + 3) * 0.02 + 0.02


def test_who_decodes_has_a_token_every_s_steps_beside_a_long_prompt() -> None:
    pipeline = Pipeline(2, lambda work: 0.01, max_num_batched_tokens=64)
    plain(pipeline, 2, max_tokens=60)
    pipeline.run(until=0.1)
    plain(pipeline, 1, max_tokens=1, num_prompt_tokens=1500)
    pipeline.run(until=0.3)
    last = pipeline.steps[-12:]
    assert all(step.work.num_prompt_tokens for step in last)
    for request in pipeline.line.replica.running[:2]:
        assert sum(request in step.sampled for step in last) == 6


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_target_between_two_tokens_is_that_of_all_stages(num_stages: int) -> None:
    """Steps are shorter where a token takes several of them."""
    pipeline = Pipeline(num_stages, seconds_of, target_itl_ms=40.0)
    plain(pipeline, 4, max_tokens=2000)
    for _ in range(4):  # it learns what prompts cost
        plain(pipeline, 1, max_tokens=2, num_prompt_tokens=300)
        pipeline.run(until=pipeline.now + 0.5)
    plain(pipeline, 1, max_tokens=2, num_prompt_tokens=3000)
    start = len(pipeline.steps)
    pipeline.run(until=pipeline.now + 0.5)
    one = pipeline.line.replica.running[0]
    ends = [
        end for step, end in zip(pipeline.steps[start:], pipeline.step_ends[start:], strict=True) if one in step.sampled
    ]
    gaps = [later - earlier for earlier, later in pairwise(ends)]
    assert max(gaps) < 0.040 * 1.25


def test_a_prompt_with_an_image_keeps_what_it_has_until_the_executor_has_looked_at_that() -> None:
    """The last chunk of a prompt may be decided before the first one is done, and lack a block that lies behind the
    window then: giving up for that would begin the same again, for ever."""
    executor = FakeExecutor(
        num_blocks=8, windows={1: 3}, block_size=4, max_num_seqs=1, max_num_batched_tokens=4, pipeline_stages=4
    )
    line = PureLine(executor, pipeline_depth=1)
    request = line.add([5] * 13, images=PromptImages([image(1, 0, 1)], 13), max_tokens=1)
    line.run(max_steps=50)
    assert request.is_finished and request.num_preemptions == 0
