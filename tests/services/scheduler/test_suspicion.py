"""A request that brings down every executor ends; the others lose time, never their answers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.request import FinishReason
from pagewire.services.scheduler.suspicion import MAX_LOSSES
from tests.fakes import FakeExecutor, FakeExecutorDied, expected_output
from tests.services.scheduler.pure_line import PureLine

VOCAB_SIZE = 1000
DEADLY = 999


def prompt_of(number: int, length: int = 8) -> list[int]:
    return [(number * 101 + i) % 900 for i in range(length)]


def make_line(**config: Any) -> PureLine:
    return PureLine(
        FakeExecutor(num_blocks=64, block_size=4, max_num_batched_tokens=20, deadly_token_id=DEADLY), **config
    )


def run(line: PureLine) -> int:
    """Until everybody has ended, with a new executor for each that dies; returns how many died."""
    num_deaths = 0
    while line.scheduler.num_running or line.scheduler.num_waiting or line.num_in_flight():
        assert num_deaths < 50, "executors die for ever"
        try:
            scheduled = line.schedule() is not None
        except FakeExecutorDied:
            num_deaths += 1
            line.die()
        else:
            if not scheduled and line.num_in_flight():
                line.receive()
    return num_deaths


@settings(max_examples=100, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["good", "good", "deadly"]), min_size=1, max_size=8),
    pipeline_depth=st.sampled_from([1, 2]),
    max_num_seqs=st.integers(1, 8),
    enable_chunked_prefill=st.booleans(),
    num_steps_before=st.integers(0, 4),
)
def test_only_the_deadly_end_with_an_error(
    kinds: list[str], pipeline_depth: int, max_num_seqs: int, enable_chunked_prefill: bool, num_steps_before: int
) -> None:
    line = make_line(
        pipeline_depth=pipeline_depth, max_num_seqs=max_num_seqs, enable_chunked_prefill=enable_chunked_prefill
    )
    line.add(prompt_of(0), max_tokens=12)
    for _ in range(num_steps_before):
        line.schedule()
        line.receive()
    for number, kind in enumerate(kinds, start=1):
        line.add([DEADLY, *prompt_of(number)] if kind == "deadly" else prompt_of(number), max_tokens=12)
    num_deaths = run(line)
    for request_id, kind in enumerate(["good", *kinds], start=1):
        good = kind == "good"
        assert line.ends[request_id] == [FinishReason.LENGTH if good else FinishReason.ERROR]
        tokens = expected_output(prompt_of(request_id - 1), 12, vocab_size=VOCAB_SIZE)
        assert line.outputs[request_id] == (tokens if good else [])
    assert num_deaths <= MAX_LOSSES * kinds.count("deadly")
    assert line.replica.num_free_blocks == 64


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_deaths_with_progress_in_between_are_nobodys_fault(pipeline_depth: int) -> None:
    line = make_line(pipeline_depth=pipeline_depth)
    requests = [line.add(prompt_of(number), max_tokens=56) for number in range(4)]
    for _ in range(6):
        before = [request.num_tokens for request in requests]
        while any(request.num_tokens == num for request, num in zip(requests, before, strict=True)):
            while line.schedule() is not None:
                pass
            line.receive()
        line.schedule()
        line.die()
    assert line.scheduler.num_waiting == 4
    assert run(line) == 0 and not line.condemned
    for number in range(4):
        assert line.outputs[number + 1] == expected_output(prompt_of(number), 56, vocab_size=VOCAB_SIZE)


def test_deaths_of_an_idle_executor_and_deaths_while_waiting_do_not_count() -> None:
    line = make_line(max_num_seqs=1)
    line.add(prompt_of(1), max_tokens=200)
    waiting = line.add(prompt_of(2), max_tokens=5)
    for _ in range(MAX_LOSSES):
        line.die()
        line.schedule()
        line.receive()
    assert run(line) == 0 and not line.condemned
    assert waiting.finish_reason is FinishReason.LENGTH


def test_a_cleared_suspect_runs_beside_others_again() -> None:
    line = make_line(pipeline_depth=1)
    for number in range(3):
        line.add(prompt_of(number, 4), max_tokens=30)
    for _ in range(MAX_LOSSES - 1):
        line.schedule()
        line.die()
    batches = []
    for _ in range(6):
        step = line.schedule()
        assert step is not None
        batches.append(step.request_ids)
        line.receive()
    assert batches[:3] == [[1], [2], [3]] and batches[3] == [1, 2, 3]
    assert run(line) == 0
