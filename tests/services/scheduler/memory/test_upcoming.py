"""Requests with a common prompt that arrive together: one computes it, and the others wait for its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from pagewire.services.scheduler.core.scheduler import QueueFull
from pagewire.services.scheduler.values.images import PromptImages
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import ScheduledStep
from tests.fakes import FakeExecutor, expected_output
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.values.test_images import image

VOCAB_SIZE = 1000
COMMON = [5 * i % VOCAB_SIZE for i in range(40)]


def make_line(num_blocks: int = 64, *, num_replicas: int = 1, num_rows: int = 8, **config: Any) -> PureLine:
    """Returns a line with blocks of 4 tokens, where a step computes 8 tokens of a long prompt."""
    executors = [
        FakeExecutor(num_blocks=num_blocks, block_size=4, max_num_seqs=num_rows, max_num_batched_tokens=64)
        for _ in range(num_replicas)
    ]
    return PureLine(
        *executors, **{"pipeline_depth": 1, "long_prefill_token_threshold": 8, "max_long_partial_prefills": 8} | config
    )


def add(line: PureLine, *own: int, common: int = 40, **kwargs: Any) -> Request:
    return line.add([*COMMON[:common], *own], **{"max_tokens": 3} | kwargs)


def scheduled(step: ScheduledStep | None) -> dict[int, int]:
    assert step is not None
    return dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True))


def step_once(line: PureLine, index: int = 0) -> dict[int, int]:
    step = line.schedule(index)
    line.receive(index)
    return scheduled(step)


def finish(line: PureLine, *requests: Request) -> None:
    line.run()
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert line.outputs[request.request_id] == expected_output(prompt, 3, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_a_prompt_of_several_steps_is_computed_once(pipeline_depth: int) -> None:
    line = make_line(pipeline_depth=pipeline_depth)
    requests = [add(line, own) for own in range(8)]
    finish(line, *requests)
    assert [request.num_cached_tokens for request in requests] == [0] + [40] * 7
    assert line.executor.num_executed_tokens == 41 + 7 * 1 + 8 * 2


def test_who_shares_less_than_a_block_does_not_wait_and_overtakes() -> None:
    line = make_line()
    add(line, 1)
    add(line, 2)
    other = line.add([*COMMON[:3], *range(100, 105)], max_tokens=3)
    assert step_once(line) == {1: 8, 3: 8}
    assert other.num_output_tokens == 1


def test_no_request_waits_beyond_what_is_shared() -> None:
    """The second request shares 17 tokens with the first: it finds 16, in the step that computes them."""
    line = make_line()
    add(line, 1)
    add(line, 700, common=17)
    assert step_once(line) == {1: 8}
    assert step_once(line) == {1: 8, 2: 2}


def test_no_request_waits_for_a_block_that_could_not_be_used() -> None:
    """The last token of a prompt has to be computed, and so the whole block that it ends."""
    line = make_line()
    add(line, 1)
    add(line, common=12)
    assert step_once(line) == {1: 8, 2: 4}


def test_others_of_the_same_prompt_go_on_when_the_first_is_aborted() -> None:
    line = make_line()
    first, second, third = (add(line, own) for own in range(3))
    assert step_once(line) == {1: 8}
    line.abort(first)
    assert step_once(line) == {2: 8}, "what it had computed is found, and the second computes the rest"
    finish(line, second, third)
    assert (second.num_cached_tokens, third.num_cached_tokens) == (8, 40)


def test_others_of_the_same_prompt_go_on_when_the_executor_is_lost() -> None:
    line = make_line()
    requests = [add(line, own) for own in range(4)]
    step_once(line)
    line.die()
    finish(line, *requests)
    assert [request.num_cached_tokens for request in requests] == [0, 40, 40, 40]


def test_a_suspect_does_not_wait_for_those_that_pause_for_it() -> None:
    line = make_line(num_replicas=2)
    other, suspect = add(line, 1), add(line, 2)
    assert step_once(line) == {1: 8}
    for _ in range(2):
        line.schedule(1)
        line.lose(1)
        line.attach(1)
    line.lose(1)
    assert step_once(line) == {2: 8}, "alone, after what the other has computed"
    finish(line, other, suspect)


def test_a_request_of_higher_priority_waits_without_anybody_being_preempted() -> None:
    line = make_line(num_rows=2, scheduling_policy="priority")
    first, second = add(line, 1, priority=5), line.add(range(500, 520), max_tokens=30, priority=6)
    step_once(line)
    urgent = add(line, 2, priority=0)
    finish(line, first, urgent)
    assert urgent.num_cached_tokens == 40
    assert (first.num_preemptions, second.num_preemptions) == (0, 1), "only when there is something to be gained"


@pytest.mark.parametrize("salts", [("", "a"), ("a", "b")])
def test_requests_of_different_salts_do_not_wait_for_each_other(salts: tuple[str, str]) -> None:
    line = make_line()
    for salt in salts:
        add(line, 1, cache_salt=salt)
    assert step_once(line) == {1: 8, 2: 8}


def test_without_prefix_caching_none_waits() -> None:
    line = make_line(enable_prefix_caching=False)
    for own in range(2):
        add(line, own)
    assert step_once(line) == {1: 8, 2: 8}


def test_each_replica_computes_the_prompt_once() -> None:
    line = make_line(num_replicas=2)
    requests = [add(line, own) for own in range(4)]
    finish(line, *requests)
    assert sorted(request.num_cached_tokens or 0 for request in requests) == [0, 0, 40, 40]


def test_a_request_that_waits_for_a_prompt_keeps_none_out_of_the_free_rows() -> None:
    line = make_line(num_rows=4, max_waiting_requests=0)
    for own in range(3):
        add(line, own)
    assert step_once(line) == {1: 8}
    line.add(range(500, 504), max_tokens=3)
    with pytest.raises(QueueFull):
        line.add(range(600, 604), max_tokens=3)


def test_a_later_request_does_not_take_the_rows_of_waiting_ones() -> None:
    line = make_line(num_rows=3)
    requests = [add(line, own) for own in range(3)]
    later = line.add(range(500, 504), max_tokens=3)
    for _ in range(6):
        step_once(line)
    assert all(request.num_output_tokens for request in requests) and not later.num_output_tokens


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_an_equal_image_is_computed_once(max_tokens: int) -> None:
    """Others wait until the executor has accepted it."""
    line = make_line(pipeline_depth=2, long_prefill_token_threshold=0)
    images = PromptImages([image(1, 3, 6)], len(COMMON))
    requests = [add(line, images=images, max_tokens=max_tokens) for _ in range(4)]
    line.run()
    assert [request.num_cached_tokens for request in requests] == [0] + [36] * 3


def test_who_waits_for_an_image_that_is_refused_is_heard_itself() -> None:
    line = PureLine(FakeExecutor(num_blocks=64, block_size=4, refused_token_id=COMMON[0]))
    images = PromptImages([image(1, 3, 6)], len(COMMON))
    requests = [add(line, images=images) for _ in range(3)]
    line.run()
    assert [line.ends[request.request_id] for request in requests] == [[FinishReason.ERROR]] * 3
