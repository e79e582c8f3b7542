"""Loads: what a tier holds is loaded instead of computed, and whatever becomes of a load, requests get their tokens."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.memory.reset import reset
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import InvalidResult
from pagewire.v1.executor_pb2 import KVLoaded, KVTierKind
from tests.fakes import FakeExecutor, FakeTier, expected_output
from tests.services.scheduler.core.test_properties import Story, kinds, many_arrivals
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.strategies import ROLES, Arrival, lines
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


# -- what is loaded --------------------------------------------------------------------------------------------------


def filled(prompt: list[int] = PROMPT, **executor: Any) -> FakeTier:
    """Returns a tier that holds the blocks of a prompt."""
    tier = FakeTier()
    line = line_of(tier, **executor)
    add(line, prompt, max_tokens=1)
    line.run()
    return tier


def test_a_step_may_consist_of_a_load() -> None:
    line = line_of(filled())
    request = add(line)
    step = line.schedule()
    assert step is not None and step.tiers is not None and not step.request_ids
    (load,) = step.tiers.loads
    assert [(one.group, len(one.ids)) for one in load.blocks] == [(0, 10)] and not load.source
    assert line.schedule() is None
    line.receive()
    assert line.schedule() is None
    assert line.replica.kv.num_free_blocks == 246
    line.end_load()
    assert line.replica.kv.num_free_blocks == 256
    line.run()
    assert request.num_cached_tokens == 40
    assert_right(line, request)


def test_others_overtake_a_request_that_waits_for_a_load() -> None:
    line = line_of(filled())
    loading, other = add(line), add(line, [7] * 9, max_tokens=2)
    step = line.schedule()
    assert step is not None and step.tiers is not None and step.tiers.loads
    assert step.request_ids == [other.request_id]
    line.receive()
    line.schedule()
    line.receive()
    assert other.is_finished and not loading.num_output_tokens
    line.run()
    assert loading.num_cached_tokens == 40
    assert_right(line, loading, other)


def test_requests_with_one_prefix_wait_for_one_load() -> None:
    line = line_of(filled())
    requests = [add(line, [*PROMPT, i]) for i in range(4)]
    line.run()
    assert [request.num_cached_tokens for request in requests] == [40] * 4
    assert sum(len(step.tiers.loads) for step in line.steps if step.tiers is not None) == 1
    assert_right(line, *requests)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("lost", [{0}, {4}, {9}, range(10), range(99)])
def test_what_was_not_found_is_computed(executor: dict[str, Any], lost: Collection[int]) -> None:
    line = line_of(filled(**executor), **executor)
    request = add(line)
    line.schedule()
    line.end_load(lost=lost)
    line.run()
    assert_right(line, request)
    if executor == {}:
        assert request.num_cached_tokens == 4 * min(lost)
    loads = [step.tiers.loads for step in line.steps if step.tiers is not None and step.tiers.loads]
    assert len(loads) == 1, "it is not tried again"


def test_what_is_in_the_cache_is_not_loaded() -> None:
    line = line_of(filled())
    add(line, PROMPT[:18], max_tokens=1)
    line.run()
    request = add(line)
    step = line.schedule()
    assert step is not None and step.tiers is not None
    assert [len(one.ids) for one in step.tiers.loads[0].blocks] == [6]
    line.run()
    assert request.num_cached_tokens == 40


@pytest.mark.parametrize(("num_blocks", "is_loaded"), [(30, True), (13, True), (12, False), (101, True)])
def test_a_load_takes_no_blocks_that_others_need(num_blocks: int, is_loaded: bool) -> None:
    line = line_of(filled(), num_blocks=num_blocks)
    running = add(line, [5] * 7, max_tokens=20)  # two blocks, and more later
    line.schedule()
    request = add(line, max_tokens=2)
    line.schedule()
    assert bool(line.executor.loads) is is_loaded
    line.run()
    assert_right(line, running, request)


def learned_line(tier: FakeTier, load_rate: float) -> PureLine:
    """Returns a line that knows what steps take: a millisecond for each token. A block has 1000 bytes."""
    executor = FakeExecutor(block_size=4, tier=tier, max_num_batched_tokens=64)
    executor.kv_groups = tuple(replace(group, block_bytes=1000) for group in executor.kv_groups)
    executor.load_rate = load_rate
    line = PureLine(executor)
    for i in range(20):
        line.add([900 - i] * 33, max_tokens=2, ignore_eos=True)
        while line.schedule() is not None:
            work = line.steps[-1].work
            line.receive(seconds=0.001 * (work.num_prompt_tokens + work.num_decodes))
    return line


@pytest.mark.parametrize(
    ("load_rate", "is_loaded"),
    [(1e6, True), (260_000.0, True), (200_000.0, False), (1000.0, False), (0.0, True)],
)
def test_only_what_is_faster_to_load_is_loaded(load_rate: float, is_loaded: bool) -> None:
    line = learned_line(filled(), load_rate)  # computing 40 tokens takes 40 ms, and loading them 10 kB
    add(line)
    line.schedule()
    assert bool(line.executor.loads) is is_loaded


def test_rates_are_learned() -> None:
    line = learned_line(filled(), 1e6)
    line.schedule()
    tiers = line.tiers.of_replica[0]
    before = tiers.costs.seconds({KVTierKind.KV_TIER_KIND_DISK: 10_000})
    assert before == pytest.approx(0.01)
    for _ in range(20):
        tiers.costs.learn(1.0, {KVTierKind.KV_TIER_KIND_DISK: 10_000}, is_whole=False)
    assert tiers.costs.seconds({KVTierKind.KV_TIER_KIND_DISK: 10_000}) == pytest.approx(1.0, rel=0.1)
    add(line)
    line.schedule()
    assert not line.executor.loads, "loading is too slow by now"
    line.run()
    num_tries = 0
    while not line.executor.loads:  # a tier that was slow once is tried again
        num_tries += 1
        reset_device(line)
        add(line)
        line.schedule()
        if not line.executor.loads:
            line.run()
    assert 1 < num_tries < 2000


def reset_device(line: PureLine) -> None:
    """Forgets what the KV cache holds, but not what the tiers do."""
    for group in line.replica.kv.groups:
        for block_hash in list(group.pool.hashes):
            group.pool.forget(block_hash)


def test_a_prompt_that_can_be_loaded_is_not_long() -> None:
    line = PureLine(FakeExecutor(block_size=4, tier=filled(), max_num_batched_tokens=64))
    assert [add(line, prompt).is_long for prompt in (PROMPT, [9] * 41)] == [False, True]


# -- whatever happens meanwhile --------------------------------------------------------------------------------------


def loading_line() -> tuple[PureLine, Request]:
    """Returns a line with a load under way, and the request that waits for it."""
    line = line_of(filled())
    request = add(line)
    line.schedule()
    line.receive()
    assert line.executor.loads
    return line, request


def test_an_abort_leaves_the_load_to_others() -> None:
    line, request = loading_line()
    line.abort(request)
    line.end_load()
    assert line.replica.kv.num_free_blocks == 256
    again = add(line)
    line.run()
    assert again.num_cached_tokens == 40


def test_the_executor_is_lost() -> None:
    line, request = loading_line()
    line.die()
    line.run()
    assert request.num_cached_tokens == 40, "it is loaded by the next one"
    assert_right(line, request)


def test_a_request_may_stop_waiting() -> None:
    line, request = loading_line()
    (load,) = line.tiers.of_replica[0]._loads.present
    load.give_up()
    line.schedule()
    assert request.num_computed_tokens == 41
    line.end_load()
    line.run()
    assert request.num_cached_tokens == 0
    assert_right(line, request)
    assert line.replica.kv.num_free_blocks == 256


def test_a_reset_voids_what_is_under_way_and_the_tiers() -> None:
    line, request = loading_line()
    tier = line.executor.tier
    assert tier is not None
    blocks = dict(tier.blocks)
    reset(line.replica.kv, line.replica.running)
    assert not tier.blocks
    tier.blocks = blocks  # what the executor has begun to read
    line.end_load()
    line.tell_tiers()
    line.run()
    assert request.num_cached_tokens == 0
    assert_right(line, request)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_was_computed_with_nan_is_forgotten(executor: dict[str, Any]) -> None:
    line = line_of(**executor)
    line.executor.nan_token_id, line.executor.deadly_from = 1, 6
    request = add(line, max_tokens=20)
    line.run()
    assert request.finish_reason is FinishReason.ERROR
    tier = line.executor.tier
    assert tier is not None and tier.num_saves and not tier.blocks
    line.executor.nan_token_id = None
    line.die()
    again = add(line, max_tokens=20)
    line.run()
    assert_right(line, again)
    assert again.num_cached_tokens == 0


def test_a_preempted_request_comes_back_by_a_load() -> None:
    line = line_of(num_blocks=24)
    first, second = add(line, PROMPT, max_tokens=40), add(line, [9] * 30, max_tokens=40)
    for _ in range(60):
        line.schedule()
        if line.num_in_flight():
            line.receive()
        line.tell_tiers()
        if second.num_preemptions:
            break
    assert second.num_preemptions and not first.is_finished
    num_saved = second.num_tokens
    evict_free_blocks(line)
    num_before = line.executor.num_executed_tokens
    line.run()
    loaded = [load for step in line.steps if step.tiers is not None for load in step.tiers.loads]
    assert loaded, "it is loaded"
    assert_right(line, first, second)
    assert line.executor.num_executed_tokens - num_before < num_saved + 80
    assert len(line.outputs[second.request_id]) == 40


def evict_free_blocks(line: PureLine) -> None:
    """Forgets the contents of blocks that no request holds."""
    for group in line.replica.kv.groups:
        for block in list(group.pool._free):
            if block.block_hash is not None:
                group.pool.forget(block.block_hash)


@pytest.mark.parametrize(("load_id", "missing"), [(7, []), (1, [10]), (1, [-1])])
def test_a_report_of_no_load_breaks_the_stream(load_id: int, missing: list[int]) -> None:
    line, _ = loading_line()
    tiers = line.replica.kv.tiers
    assert tiers is not None
    with pytest.raises(InvalidResult, match="reports load"):
        tiers.end_loads([KVLoaded(load_id=load_id, missing=missing)])


# -- what is saved ---------------------------------------------------------------------------------------------------


def saved(line: PureLine) -> list[int]:
    """Returns the number of blocks that each step names."""
    return [sum(len(one.ids) for one in step.tiers.saves) if step.tiers is not None else 0 for step in line.steps]


def test_a_block_is_saved_once_by_the_step_that_fills_it() -> None:
    line = line_of(max_num_batched_tokens=16)
    add(line, max_tokens=9)
    line.run()
    assert saved(line)[:3] == [4, 4, 2] and sum(saved(line)) == 12
    line.steps.clear()
    add(line, max_tokens=9)
    line.run()
    reset_device(line)
    add(line, max_tokens=9)  # loaded
    line.run()
    assert sum(saved(line)) == 0


def test_without_tiers_nothing_is_saved_or_loaded() -> None:
    line = PureLine(FakeExecutor(block_size=4))
    add(line)
    line.run()
    assert line.replica.kv.tiers is None
    assert all(step.tiers is None for step in line.steps)


# -- whatever happens in whatever order --------------------------------------------------------------------------------


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
        lines(ONE_OR_TWO, max_draft_tokens=st.sampled_from([0, 2]), has_tier=ALWAYS, roles=ROLES),
        lines(ONE_OR_TWO, windows=st.just([5]), has_tier=ALWAYS, roles=ROLES),
        lines(ONE_OR_TWO, states=st.sampled_from([2, -1]), has_tier=ALWAYS, roles=ROLES),
        lines(ONE_OR_TWO, windows=st.just([5]), states=st.just(2), has_tier=ALWAYS, roles=ROLES),
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
