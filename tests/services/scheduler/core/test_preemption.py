"""Preemption among several tenants."""

from tests.fakes import FakeExecutor
from tests.services.scheduler.pure_line import PureLine

BLOCK_SIZE = 4


def test_no_request_is_preempted_that_would_come_back_at_once() -> None:
    """A tenant without running requests takes from one that has several only if that one was served more: if less, it
    has the next turn, and with it the freed blocks."""
    executor = FakeExecutor(num_blocks=10, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=64)
    line = PureLine(executor, enable_prefix_caching=False)
    first = line.add(range(4), max_tokens=24, tenant="modest")
    served_much = line.add(range(24), max_tokens=1, tenant="served much")
    while not served_much.is_finished:
        line.schedule()
        line.receive()
    second = line.add(range(8), max_tokens=4, tenant="modest")
    line.schedule()
    line.receive()
    waits = line.add(range(7 * BLOCK_SIZE), max_tokens=1, tenant="served much")
    while not second.is_finished:
        line.schedule()
        line.receive()
        assert not second.num_preemptions
    line.run()
    assert first.is_finished and waits.is_finished


def test_no_request_is_preempted_for_one_that_waits_for_long_prompts() -> None:
    """The waiting request would not enter, and the preempted one would be back with the next step."""
    executor = FakeExecutor(num_blocks=18, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=64)
    line = PureLine(executor, enable_prefix_caching=False, long_prefill_token_threshold=2, target_itl_ms=0)
    line.add(range(40), max_tokens=1, tenant="busy")
    short = line.add(range(2), max_tokens=12, tenant="busy")
    line.schedule()
    line.receive()
    long = line.add(range(28), max_tokens=1, tenant="other")
    line.run()
    assert not short.num_preemptions
    assert long.is_finished


def test_prompts_that_are_not_split_run_whatever_a_step_takes() -> None:
    executor = FakeExecutor(num_blocks=64, block_size=BLOCK_SIZE, max_num_seqs=1, max_num_batched_tokens=64)
    line = PureLine(executor, enable_prefix_caching=False, enable_chunked_prefill=False, target_itl_ms=1)
    requests = [line.add(range(length), max_tokens=3) for length in (4, 40, 8, 60, 50)]
    while line.schedule() is not None or line.num_in_flight():
        if line.num_in_flight():
            line.receive(seconds=0.01 * sum(line.oldest_in_flight().num_scheduled_tokens))
    assert all(request.is_finished for request in requests)
