"""Single decisions of the scheduler, looked at closely."""

from typing import Any

import pytest

from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.core.scheduler import QueueFull
from pagewire.services.scheduler.values.blocks import ComputedBlocks
from pagewire.services.scheduler.values.request import FinishReason, Request, RequestStatus
from pagewire.services.scheduler.values.step import InvalidResult, ScheduledStep, StepResult
from tests.fakes import FakeExecutor, expected_output
from tests.services.scheduler.pure_line import PureLine

VOCAB_SIZE = 1000


def prompt_of(number: int, length: int = 8) -> list[int]:
    return [(number * 101 + i) % VOCAB_SIZE for i in range(length)]


def make_line(
    num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, budget: int = 64, **kwargs: Any
) -> PureLine:
    executor = FakeExecutor(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    return PureLine(executor, **kwargs)


def scheduled(step: ScheduledStep | None) -> dict[int, int]:
    assert step is not None
    return dict(zip(step.request_ids, step.num_scheduled_tokens, strict=True))


def step_once(line: PureLine) -> dict[int, int]:
    """One step and its result, as with pipeline depth 1."""
    step = line.schedule()
    line.receive()
    return scheduled(step)


# -- one rule --


def test_decodes_go_first_then_running_prefills_then_waiting() -> None:
    line = make_line(budget=10, pipeline_depth=1, enable_prefix_caching=False)
    long = line.add(prompt_of(1, 24), max_tokens=4)
    short = line.add(prompt_of(2, 4), max_tokens=20)
    assert step_once(line) == {1: 10}
    assert step_once(line) == {1: 10}
    assert step_once(line) == {1: 4, 2: 4}
    third = line.add(prompt_of(3, 30), max_tokens=2)
    assert step_once(line) == {1: 1, 2: 1, 3: 8}
    assert step_once(line) == {1: 1, 2: 1, 3: 8}
    assert long.num_output_tokens == 3 and short.num_output_tokens == 3 and third.num_output_tokens == 0


def test_a_long_prefill_is_capped_only_beside_others() -> None:
    line = make_line(budget=32, pipeline_depth=1, long_prefill_token_threshold=6, max_long_partial_prefills=2)
    line.add(prompt_of(1, 40), max_tokens=9)
    assert step_once(line) == {1: 32}
    line.add(prompt_of(2, 20), max_tokens=9)
    assert step_once(line) == {1: 6, 2: 6}


def test_without_chunks_a_prompt_runs_whole_or_not_at_all() -> None:
    line = make_line(budget=20, pipeline_depth=1, enable_chunked_prefill=False)
    line.add(prompt_of(1, 15), max_tokens=3)
    line.add(prompt_of(2, 15), max_tokens=3)
    assert step_once(line) == {1: 15}
    assert step_once(line) == {1: 1, 2: 15}
    with pytest.raises(InvalidRequest, match="21 tokens, but one step computes at most 20"):
        line.add(prompt_of(3, 21))


def test_two_steps_are_in_flight_and_the_last_token_is_foreseen() -> None:
    line = make_line(pipeline_depth=2)
    line.add(prompt_of(1), max_tokens=2)
    assert scheduled(line.schedule()) == {1: 8}
    assert scheduled(line.schedule()) == {1: 1}
    assert line.schedule() is None
    line.receive()
    assert line.schedule() is None, "both tokens were scheduled already"
    line.receive()
    assert line.ends[1] == [FinishReason.LENGTH]


def test_requests_beyond_the_budget_get_no_row() -> None:
    line = make_line(budget=3, max_num_seqs=8, pipeline_depth=1)
    for number in range(5):
        line.add(prompt_of(number, 1), max_tokens=4)
    assert step_once(line) == {1: 1, 2: 1, 3: 1}
    assert step_once(line) == {1: 1, 2: 1, 3: 1}
    assert line.scheduler.num_running == 3


# -- ends --


def test_stop_token_ends_and_is_reported() -> None:
    tokens = expected_output(prompt_of(1), 6, vocab_size=VOCAB_SIZE)
    line = make_line()
    request = line.add(prompt_of(1), stop_token_ids=frozenset([tokens[3]]))
    line.run()
    assert line.outputs[1] == tokens[:4]
    assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, tokens[3])


@pytest.mark.parametrize(("ignore_eos", "num_tokens"), [(False, 3), (True, 6)])
def test_eos_ends_unless_ignored(ignore_eos: bool, num_tokens: int) -> None:
    tokens = expected_output(prompt_of(1), 6, vocab_size=VOCAB_SIZE)
    line = PureLine(FakeExecutor(eos_token_ids=[tokens[2]]))
    request = line.add(prompt_of(1), max_tokens=6, ignore_eos=ignore_eos)
    line.run()
    assert line.outputs[1] == tokens[:num_tokens]
    assert request.finish_reason == (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)
    assert request.stop_token_id is None


@pytest.mark.parametrize(("max_model_len", "num_blocks", "limit"), [(20, 64, 20), (4096, 4, 16)])
def test_model_and_memory_limit_a_request(max_model_len: int, num_blocks: int, limit: int) -> None:
    line = make_line(num_blocks=num_blocks, max_model_len=max_model_len)
    line.add(prompt_of(1), max_tokens=1000)
    line.run()
    assert len(line.outputs[1]) == limit - 8
    assert line.ends[1] == [FinishReason.LENGTH]
    with pytest.raises(InvalidRequest, match=str(limit)):
        line.add(prompt_of(2, limit))


@pytest.mark.parametrize(
    ("num_resumed", "params", "reason"),
    [
        (3, {"max_tokens": 3}, FinishReason.LENGTH),
        (3, {"stop": 2}, FinishReason.STOP),
        (3, {"stop": 2, "min_tokens": 3}, None),
        (3, {"stop": 1}, None),
        (3, {"max_tokens": 8}, None),
    ],
)
def test_resumed_tokens_count_and_may_be_the_end(num_resumed: int, params: dict, reason: FinishReason | None) -> None:
    tokens = expected_output(prompt_of(1), 8, vocab_size=VOCAB_SIZE)
    params = {"max_tokens": 8, **params}
    if "stop" in params:
        params["stop_token_ids"] = frozenset([tokens[params.pop("stop")]])
    line = make_line()
    request = line.add(prompt_of(1), tokens[:num_resumed], **params)
    if reason is not None:
        assert line.ends[1] == [reason] and line.schedule() is None
    line.run()
    assert line.outputs[1] == ([] if reason is not None else tokens[num_resumed:])
    assert request.num_output_tokens == (3 if reason is not None else 8)


# -- prefix cache --


def test_requests_of_one_step_share_their_prefix() -> None:
    line = make_line()
    first, second = line.add(prompt_of(1, 10), max_tokens=3), line.add([*prompt_of(1, 8), 7, 7], max_tokens=3)
    assert scheduled(line.schedule()) == {1: 10, 2: 2}
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    line.run()
    assert line.replica.counts.num_prefix_hits == 8


def test_generated_blocks_are_shared_while_their_request_runs() -> None:
    tokens = expected_output(prompt_of(1), 40, vocab_size=VOCAB_SIZE)
    line = make_line(pipeline_depth=1)
    line.add(prompt_of(1), max_tokens=40)
    for _ in range(10):
        step_once(line)
    # Ten tokens are known, nine have KV: prompt and output fill four blocks of four.
    follower = line.add([*prompt_of(1), *tokens[:10], 5], max_tokens=2)
    assert step_once(line)[2] == 3
    assert follower.num_cached_tokens == 16
    line.run()


def test_a_full_hit_computes_the_last_block_again() -> None:
    line = make_line()
    for _ in range(2):
        request = line.add(prompt_of(1, 8), max_tokens=2)
        line.run()
    assert request.num_cached_tokens == 4


def test_the_prefix_cache_can_be_off() -> None:
    line = make_line(enable_prefix_caching=False)
    for _ in range(2):
        request = line.add(prompt_of(1, 9), max_tokens=2)
        line.run()
    assert request.num_cached_tokens == 0


def test_a_new_executor_has_no_prefixes() -> None:
    line = make_line()
    line.add(prompt_of(1, 9), max_tokens=2)
    line.run()
    line.die()
    request = line.add(prompt_of(1, 9), max_tokens=2)
    line.run()
    assert request.num_cached_tokens == 0


# -- memory and priority --


def test_a_request_that_lacks_blocks_is_looked_up_again_only_when_some_came_free() -> None:
    line = make_line(num_blocks=16, pipeline_depth=1)
    line.add(prompt_of(1, 40), max_tokens=20)
    line.add(prompt_of(2, 4), max_tokens=6)
    step_once(line)
    line.add(prompt_of(3, 40), max_tokens=2)
    manager = line.replica.kv
    assert manager is not None
    lookups: list[int] = []
    get_computed_blocks = manager.get_computed_blocks

    def count(request: Request) -> ComputedBlocks:
        lookups.append(request.request_id)
        return get_computed_blocks(request)

    manager.get_computed_blocks = count  # type: ignore[method-assign]
    while not line.ends[2]:
        step_once(line)
    assert lookups == [3]
    step_once(line)
    assert lookups == [3, 3], "request 2 gave blocks back"
    line.run()
    assert line.outputs[3] == expected_output(prompt_of(3, 40), 2, vocab_size=VOCAB_SIZE)


def test_the_latest_is_preempted_and_comes_back_first() -> None:
    line = make_line(num_blocks=5, pipeline_depth=1, enable_prefix_caching=False)
    first, second = line.add(prompt_of(1), max_tokens=12), line.add(prompt_of(2), max_tokens=12)
    third = line.add(prompt_of(3), max_tokens=1)
    while not second.num_preemptions:
        step_once(line)
    assert (first.num_preemptions, second.status, third.status) == (0, RequestStatus.WAITING, RequestStatus.WAITING)
    line.run()
    assert line.outputs[2] == expected_output(prompt_of(2), 12, vocab_size=VOCAB_SIZE)
    order = [new.request_id for step in line.steps for new in step.new_requests]
    assert order == [1, 2, 2, 3]
    assert line.replica.counts.num_preemptions == second.num_preemptions == 1


def test_priority_takes_a_row_from_the_lowest() -> None:
    line = make_line(max_num_seqs=2, pipeline_depth=1, scheduling_policy="priority")
    low, middle = line.add(prompt_of(1), priority=9, max_tokens=9), line.add(prompt_of(2), priority=5, max_tokens=9)
    assert step_once(line).keys() == {1, 2}
    line.add(prompt_of(3), priority=5, max_tokens=9)
    assert step_once(line).keys() == {2, 3}
    line.add(prompt_of(4), priority=5, max_tokens=9)
    assert step_once(line).keys() == {2, 3}, "equals do not push each other out"
    assert (low.num_preemptions, middle.num_preemptions) == (1, 0)
    line.run()
    assert line.outputs[1] == expected_output(prompt_of(1), 9, vocab_size=VOCAB_SIZE)


def test_priority_takes_blocks_only_when_they_are_missing() -> None:
    line = make_line(num_blocks=8, pipeline_depth=1, scheduling_policy="priority", enable_prefix_caching=False)
    low = line.add(prompt_of(1, 12), priority=1, max_tokens=20)
    step_once(line)
    line.add(prompt_of(2, 4), priority=0, max_tokens=2)
    assert step_once(line).keys() == {1, 2} and low.num_preemptions == 0
    line.add(prompt_of(3, 24), priority=0, max_tokens=2)
    assert 3 in step_once(line) and low.num_preemptions == 1
    line.run()


def test_no_request_is_preempted_in_vain() -> None:
    line = make_line(num_blocks=8, pipeline_depth=1, scheduling_policy="priority", enable_prefix_caching=False)
    line.add(prompt_of(1, 20), priority=0, max_tokens=3)
    low = line.add(prompt_of(2, 4), priority=5, max_tokens=3)
    step_once(line)
    line.add(prompt_of(3, 28), priority=1, max_tokens=2)  # needs what request 1 holds, too
    step_once(line)
    assert low.num_preemptions == 0


def test_waiting_is_ordered_by_priority_then_arrival() -> None:
    line = make_line(max_num_seqs=1, scheduling_policy="priority")
    for priority in (3, 1, 2, 1):
        line.add(prompt_of(priority), priority=priority, max_tokens=2)
    line.run()
    assert [new.request_id for step in line.steps for new in step.new_requests] == [2, 4, 3, 1]


# -- admission --


def test_the_queue_is_bounded_beyond_free_rows() -> None:
    line = make_line(max_num_seqs=2, max_waiting_requests=1)
    for number in range(3):
        line.add(prompt_of(number), max_tokens=50)
    with pytest.raises(QueueFull, match="1 may"):
        line.add(prompt_of(4))
    line.schedule()
    with pytest.raises(QueueFull):
        line.add(prompt_of(5))
    with pytest.raises(QueueFull):
        line.add(prompt_of(6), [1])
    resubmitted = line.add(prompt_of(6), max_tokens=2, is_resubmitted=True)
    assert resubmitted.status is RequestStatus.WAITING, "a request that was taken before is not refused"
    line.run()
    line.add(prompt_of(7), max_tokens=2)


def fill(line: PureLine, tenant: str, weight: float = 0.0) -> int:
    """Adds as many requests of a tenant as are taken."""
    for number in range(1000):
        try:
            line.add(prompt_of(number), max_tokens=5, tenant=tenant, tenant_weight=weight)
        except QueueFull:
            return number
    raise AssertionError("there is no bound")


def test_a_tenant_that_fills_the_queue_keeps_no_other_out() -> None:
    line = make_line(max_num_seqs=1, max_waiting_requests=8)
    line.add(prompt_of(0), max_tokens=50, tenant="flood")
    line.schedule()
    assert [fill(line, "flood"), fill(line, "other"), fill(line, "third")] == [8, 4, 3]
    assert [fill(line, "flood"), fill(line, "other")] == [0, 0], "what the others were let in for is not theirs"
    assert fill(line, "fourth") == 1, "twice the bound wait by now"
    assert fill(line, "fifth") == 0


def test_the_queue_is_shared_by_weight() -> None:
    line = make_line(max_num_seqs=1, max_waiting_requests=8)
    line.add(prompt_of(0), max_tokens=50, tenant="flood")
    line.schedule()
    assert [fill(line, "flood"), fill(line, "heavy", 3.0)] == [8, 6]


def test_a_bound_of_zero_means_run_now_or_never() -> None:
    line = make_line(max_num_seqs=1, max_waiting_requests=0)
    line.add(prompt_of(1), max_tokens=5)
    with pytest.raises(QueueFull):
        line.add(prompt_of(2))


# -- aborts and executors --


def test_abort_frees_blocks_at_once_and_the_row_with_the_next_step() -> None:
    line = make_line(max_num_seqs=1)
    request = line.add(prompt_of(1), max_tokens=50)
    line.schedule()
    line.schedule()
    line.abort(request)
    assert line.replica.kv.num_free_blocks == 64
    assert line.schedule() is None, "two steps are in flight"
    line.add(prompt_of(2), max_tokens=2)
    line.run()
    assert line.outputs[1] == []
    assert [step.finished_request_ids for step in line.steps[2:3]] == [[1]]


def test_a_smaller_executor_ends_what_does_not_fit() -> None:
    line = make_line(num_blocks=64)
    big, small = line.add(prompt_of(1, 60), max_tokens=30), line.add(prompt_of(2, 8), max_tokens=30)
    line.schedule()
    line.die(FakeExecutor(num_blocks=8, block_size=4))
    assert big.finish_reason == FinishReason.ERROR
    assert "8 blocks of 4 tokens = 32" in str(line.errors[1])
    line.run()
    assert small.num_tokens == 32


def test_an_executor_with_another_block_size_takes_over() -> None:
    line = make_line(block_size=4)
    line.add(prompt_of(1, 30), max_tokens=30)
    line.schedule()
    line.die(FakeExecutor(num_blocks=64, block_size=2))
    line.add(prompt_of(1, 30), max_tokens=30)
    line.run()
    for request_id in (1, 2):
        assert line.outputs[request_id] == expected_output(prompt_of(1, 30), 30, vocab_size=VOCAB_SIZE)
    assert line.replica.counts.num_prefix_hits == 28


@pytest.mark.parametrize(
    "answer",
    [
        StepResult(2, [1], [1], [5]),
        StepResult(1, [9], [1], [5]),
        StepResult(1, [1], [2], [5, 6]),
        StepResult(1, [], [], []),
    ],
)
def test_a_wrong_answer_is_a_protocol_error(answer: StepResult) -> None:
    line = make_line()
    line.add(prompt_of(1))
    line.schedule()
    with pytest.raises(InvalidResult):
        line.scheduler.update(line.replica, answer)


def test_an_answer_without_a_question_is_a_protocol_error() -> None:
    with pytest.raises(InvalidResult, match="no step is in flight"):
        make_line().replica.update(StepResult(1, [], [], []))
