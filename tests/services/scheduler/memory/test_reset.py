"""Resets of the prefix cache: running requests go on, and later ones find nothing from before."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.memory.reset import reset
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult
from tests.fakes import FakeExecutor
from tests.services.scheduler.core.test_properties import Story, kinds, many_arrivals
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.strategies import Arrival, lines
from tests.sweep import examples

PROMPT = list(range(1, 42))  # ten blocks and a token


def reset_all(line: PureLine) -> int:
    return sum(reset(replica.kv, replica.running) for replica in line.scheduler.replicas)


def line_of(**executor: Any) -> PureLine:
    return PureLine(FakeExecutor(block_size=4, **executor))


def test_what_was_computed_is_forgotten_once() -> None:
    line = line_of()
    line.add(PROMPT, max_tokens=4)
    line.run()
    assert reset_all(line) == 11
    assert reset_all(line) == 0
    again = line.add(PROMPT, max_tokens=4)
    line.run()
    assert again.num_cached_tokens == 0
    found = line.add(PROMPT, max_tokens=4)
    line.run()
    assert found.num_cached_tokens == 40


@pytest.mark.parametrize("executor", [{}, {"windows": {6: 32}}, {"num_blocks": 0, "states": {8: 32}}])
def test_a_running_request_goes_on_and_leaves_nothing_behind(executor: dict[str, Any]) -> None:
    line = line_of(**executor)
    undisturbed = line_of(**executor)
    for one in (line, undisturbed):
        running = one.add(PROMPT, max_tokens=40)
        for _ in range(5):
            one.schedule()
            one.receive()
        if one is line:
            assert reset_all(one)
        one.run()
        assert running.num_output_tokens == 40
    assert line.outputs[1] == undisturbed.outputs[1]
    whole = PROMPT + line.outputs[1]
    later, found = line.add(whole, max_tokens=1), undisturbed.add(whole, max_tokens=1)
    line.run()
    undisturbed.run()
    assert later.num_cached_tokens == 0 < (found.num_cached_tokens or 0)


def test_a_request_does_not_wait_for_blocks_that_it_cannot_find() -> None:
    line = line_of(max_num_batched_tokens=8)
    line.add(PROMPT, max_tokens=1)
    line.schedule()
    waiting = line.add(PROMPT, max_tokens=1)
    line.schedule()
    assert waiting.blocks.awaited is not None
    reset_all(line)
    line.run()
    assert waiting.num_cached_tokens == 0


def test_one_that_was_preempted_is_found_again() -> None:
    line = line_of()
    running = line.add(PROMPT, max_tokens=20)
    line.schedule()
    reset_all(line)
    line.die()
    line.run()
    later = line.add(PROMPT + line.outputs[running.request_id], max_tokens=1)
    line.run()
    assert later.num_cached_tokens == 60


class WithResets(Story):
    """Knows which blocks have not been given away since the last reset, and sees to it that none of them is found."""

    def __init__(self, line: PureLine, to_come: list[Arrival]) -> None:
        super().__init__(line, to_come)
        self.stale: list[set[tuple[int, int]]] = [set() for _ in line.executors]
        for index, executor in enumerate(line.executors):
            self.watch(index, executor)

    def watch(self, index: int, executor: FakeExecutor) -> None:
        execute = executor.execute

        def checked(step: ScheduledStep) -> StepResult:
            self.check(index, executor, step)
            return execute(step)

        executor.execute = checked  # type: ignore[method-assign]

    def check(self, index: int, executor: FakeExecutor, step: ScheduledStep) -> None:
        stale, groups = self.stale[index], executor.kv_groups
        for request in step.new_requests:
            for number, (group, held) in enumerate(zip(groups, request.blocks, strict=True)):
                size = group.state_tokens or executor.block_size
                num_found = max(0, request.num_computed_tokens // size - held.first)
                assert not stale & {(number, block_id) for block_id in held.ids[:num_found]}
                stale -= {(number, block_id) for block_id in held.ids}
        numbers = [i % len(groups) for i, count in enumerate(step.num_new_blocks) for _ in range(count)]
        stale -= set(zip(numbers, step.new_block_ids, strict=True))

    def play(self, script: list[tuple[str, int]]) -> None:
        for kind, number in script:
            if kind == "reset":
                reset_all(self.line)
                for index, executor in enumerate(self.line.executors):
                    if self.line.scheduler.replicas[index].info is not None:
                        groups = enumerate(executor.kv_groups)
                        self.stale[index] = {
                            (i, block_id) for i, group in groups for block_id in range(group.num_blocks)
                        }
            elif kind in ("death", "loss"):
                self.stale[number % len(self.stale)].clear()
            super().play([(kind, number)])


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    line=lines(
        st.integers(1, 2),
        windows=st.sampled_from([[], [], [5]]),
        states=st.sampled_from([0, 0, 2]),
        max_draft_tokens=st.just(0),
    ),
    to_come=many_arrivals,
    script=st.lists(st.tuples(st.one_of(kinds, st.just("reset")), st.integers(0, 2)), min_size=20, max_size=80),
)
def test_no_request_finds_what_was_computed_before(line: PureLine, to_come: list[Arrival], script: list) -> None:
    story = WithResets(line, to_come)
    story.play(script)
    story.finish()
