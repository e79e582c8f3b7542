"""Loads: what a tier holds is loaded instead of computed, and whatever becomes of a load, requests get their tokens."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.memory.reset import reset
from pagewire.services.scheduler.values.request import Request
from tests.fakes import FakeExecutor, FakeTier, expected_output
from tests.services.scheduler.core.test_properties import Story, kinds, many_arrivals
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.strategies import Arrival, lines
from tests.sweep import examples

PROMPT = list(range(1, 42))  # ten blocks and a token


def line_of(tier: FakeTier | None = None, **executor: Any) -> PureLine:
    return PureLine(FakeExecutor(block_size=4, tier=tier or FakeTier(), **executor))


def add(line: PureLine, prompt: list[int] = PROMPT, max_tokens: int = 4) -> Request:
    return line.add(prompt, max_tokens=max_tokens, ignore_eos=True)


def assert_right(line: PureLine, *requests: Request) -> None:
    for request in requests:
        prompt, output = request.token_ids[: request.num_prompt_tokens], line.outputs[request.request_id]
        assert output == expected_output(prompt, len(output), vocab_size=1000) and output


def restart(line: PureLine) -> None:
    """The executor comes back with empty memory, and the tier that it had."""
    line.die()


EXECUTORS = [{}, {"windows": {6: 32}}, {"num_blocks": 0, "states": {8: 32}}, {"states": {8: 32}}]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_prompt_is_loaded_after_a_restart(executor: dict[str, Any]) -> None:
    line = line_of(**executor)
    add(line)
    line.run()
    restart(line)
    num_before = line.executor.num_executed_tokens
    again = add(line)
    line.run()
    assert_right(line, again)
    assert again.num_cached_tokens == 40
    assert line.executor.num_executed_tokens - num_before == 1 + 3


class WithTiers(Story):
    """Loads end late, with parts of them or nothing; what the tiers hold is known late, or gone."""

    def play(self, script: list[tuple[str, int]]) -> None:
        line = self.line
        for kind, number in script:
            index = number % len(line.executors)
            executor = line.executors[index]
            assert executor.tier is not None
            if kind == "load" and executor.loads:
                line.end_load(index)
            elif kind == "last load, in part" and executor.loads:
                line.end_load(index, len(executor.loads) - 1, lost=range(number, 99, 2 + number))
            elif kind == "tell":
                line.tell_tiers()
            elif kind == "gone" and executor.tier.blocks:
                executor.tier.remove(*list(executor.tier.blocks)[-1 - number % len(executor.tier.blocks)])
            elif kind == "reset":
                for replica in line.scheduler.replicas:
                    reset(replica.kv, replica.running)
            else:
                super().play([(kind, number)])

    def finish(self) -> None:
        super().finish()
        for replica, executor in zip(self.line.scheduler.replicas, self.line.executors, strict=True):
            assert replica.kv.num_free_blocks == sum(group.num_blocks for group in executor.kv_groups), "a block leaks"


ONE_OR_TWO, ALWAYS = st.integers(1, 2), st.just(True)
tier_kinds = st.sampled_from(["load", "load", "last load, in part", "tell", "tell", "gone", "reset"])


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    line=st.one_of(
        lines(ONE_OR_TWO, max_draft_tokens=st.sampled_from([0, 2]), has_tier=ALWAYS),
        lines(ONE_OR_TWO, windows=st.just([5]), has_tier=ALWAYS),
        lines(ONE_OR_TWO, states=st.sampled_from([2, -1]), has_tier=ALWAYS),
        lines(ONE_OR_TWO, windows=st.just([5]), states=st.just(2), has_tier=ALWAYS),
    ),
    to_come=many_arrivals,
    script=st.lists(st.tuples(st.one_of(kinds, tier_kinds), st.integers(0, 2)), min_size=20, max_size=80),
)
def test_whatever_becomes_of_loads_requests_get_their_tokens(
    line: PureLine, to_come: list[Arrival], script: list[tuple[str, int]]
) -> None:
    story = WithTiers(line, to_come)
    story.play(script)
    story.finish()
