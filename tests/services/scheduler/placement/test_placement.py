"""Placement: a request goes to the replica with its prefix, unless waiting there costs more than computing it anew."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from benchmarks.scheduling import placement as trace
from pagewire.services.scheduler.placement.prefix_index import PrefixIndex
from pagewire.services.scheduler.values.request import Request
from tests.fakes import FakeExecutor
from tests.services.scheduler.core.test_replicas import output_of, prompt_of
from tests.services.scheduler.core.test_state_machine import SchedulerMachine, WatchedLine
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.strategies import Arrival
from tests.sweep import examples

SYSTEM = prompt_of(900, 160)


def line_of(num: int, *, executor: dict[str, Any] | None = None, **config: Any) -> PureLine:
    return PureLine(*(FakeExecutor(**(executor or {})) for _ in range(num)), **config)


def served_by(line: PureLine, request: Request) -> str:
    """The name of the replica that takes a request which has just come; it has decided, as all have, in turn."""
    for index in range(len(line.executors)):
        line.schedule(index)
    assert request.replica_id is not None
    return next(one.name for one in line.scheduler.replicas if one.replica_id == request.replica_id)


def turn(line: PureLine, tokens: list[int], **params: Any) -> str:
    """Runs a request alone; where it ran."""
    request = line.add(tokens, max_tokens=4, **params)
    name = served_by(line, request)
    line.run()
    return name


# -- by adapter ------------------------------------------------------------------------------------------------------


def line_with_adapters(num: int = 2, **config: Any) -> PureLine:
    executors = [FakeExecutor(max_adapters=2) for _ in range(num)]
    for executor in executors:
        executor.loaded_adapters |= {"a", "b", "c"}
    return PureLine(*executors, **config)


@pytest.mark.parametrize("placement", ["cache_aware", "least_load"])
def test_requests_go_where_their_adapter_is_in_a_slot(placement: str) -> None:
    line = line_with_adapters(placement=placement)
    homes = {digest: turn(line, prompt_of(number, 40), adapter_digest=digest) for number, digest in enumerate("ab")}
    assert len(set(homes.values())) == 2, "the first ones go where the last one was taken longest ago"
    for number, digest in enumerate("aaabbaba", 2):
        assert turn(line, prompt_of(number, 40), adapter_digest=digest) == homes[digest]
    assert sum(len(step.adapter_slots) for step in line.steps) == 2


def test_an_adapter_with_many_requests_spreads_over_replicas() -> None:
    line = line_with_adapters()
    first = line.add(prompt_of(0, 40), max_tokens=50, adapter_digest="a")
    home = served_by(line, first)
    others = [line.add(prompt_of(number, 40), max_tokens=50, adapter_digest="a") for number in range(1, 6)]
    assert {served_by(line, request) for request in others} == {"executor-0", "executor-1"}
    assert home in {"executor-0", "executor-1"}


def test_an_adapter_does_not_wait_for_a_slot_where_it_was_if_another_is_free() -> None:
    line = line_with_adapters()
    home = turn(line, prompt_of(0, 40), adapter_digest="a")
    busy = next(index for index, one in enumerate(line.scheduler.replicas) if one.name == home)
    line.scheduler.replicas[1 - busy].is_leaving = True
    others = [
        line.add(prompt_of(number, 40), max_tokens=50, adapter_digest=digest) for number, digest in ((1, "b"), (2, "c"))
    ]
    assert {served_by(line, request) for request in others} == {home}
    line.scheduler.replicas[1 - busy].is_leaving = False
    assert served_by(line, line.add(prompt_of(3, 40), max_tokens=4, adapter_digest="a")) != home


# -- by prefix -------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_where_it_began() -> None:
    line = line_of(4)
    homes = {}
    for number in range(8):
        homes[number] = turn(line, prompt_of(number, 100))
    assert len(set(homes.values())) == 4, "new ones go where the last one was taken longest ago"
    for number in (3, 1, 6, 0, 7):
        assert turn(line, [*prompt_of(number, 100), *prompt_of(500 + number, 30)]) == homes[number]
    assert sum(replica.counts.num_prefix_hits for replica in line.scheduler.replicas) >= 5 * 96


def test_of_two_the_longer_prefix_counts() -> None:
    line = line_of(2)
    short = turn(line, SYSTEM[:64])
    line.scheduler.replicas[0 if short == "executor-0" else 1].is_leaving = True
    long = turn(line, SYSTEM)
    for replica in line.scheduler.replicas:
        replica.is_leaving = False
    assert long != short
    assert turn(line, [*SYSTEM, 1, 2, 3]) == long


def test_tenants_do_not_follow_the_prefixes_of_others() -> None:
    line = line_of(2)
    assert turn(line, SYSTEM, cache_salt="a") == "executor-0"
    assert turn(line, SYSTEM, cache_salt="b") == "executor-1", "it finds nothing, and this one has waited longer"
    for _ in range(3):
        assert turn(line, [*SYSTEM, 5], cache_salt="b") == "executor-1"


def test_a_prefix_that_all_share_spreads_to_those_that_are_idle() -> None:
    """Load alone decides when each replica has the prefix."""
    line = line_of(3)
    turn(line, SYSTEM)
    for number in range(30):
        line.add([*SYSTEM, *prompt_of(number, 20)], max_tokens=40)
    for _ in range(3):
        for index in (0, 1, 2):
            line.schedule(index)
    running = [replica.num_running for replica in line.scheduler.replicas]
    assert sum(running) == 30 and min(running) >= 7, running
    line.run()


def test_what_is_about_to_be_computed_counts_as_found() -> None:
    line = line_of(2, executor={"max_num_batched_tokens": 64})
    first = line.add(prompt_of(1, 640), max_tokens=4)
    line.schedule(0)
    line.receive(0)
    assert first.replica_id == 0 and first.num_computed_tokens == 64
    again = line.add([*prompt_of(1, 640), 7], max_tokens=4)
    line.schedule(1)
    assert again.replica_id is None, "it waits for the prompt that is computed elsewhere"
    line.run()
    assert again.num_cached_tokens == 640


def test_an_aborted_prompt_is_not_expected_any_more() -> None:
    line = line_of(2, executor={"max_num_batched_tokens": 64})
    first = line.add(prompt_of(1, 640), max_tokens=4)
    line.schedule(0)
    line.abort(first)
    other = line.add(prompt_of(2, 20), max_tokens=100)
    line.schedule(0)
    assert other.replica_id is not None or line.schedule(1)
    again = line.add(prompt_of(1, 640), max_tokens=4)
    line.run()
    assert again.num_cached_tokens in (0, 64)


# -- against load ----------------------------------------------------------------------------------------------------


def test_a_long_queue_counts_more_than_a_short_prefix() -> None:
    line = line_of(2, executor={"max_num_batched_tokens": 64})
    home = turn(line, SYSTEM[:32])
    index = int(home[-1])
    line.scheduler.replicas[1 - index].is_leaving = True
    line.add(prompt_of(3, 3000), max_tokens=2)
    line.schedule(index)
    line.scheduler.replicas[1 - index].is_leaving = False
    request = line.add([*SYSTEM[:32], *prompt_of(4, 10)], max_tokens=4)
    line.schedule(index)
    line.schedule(1 - index)
    assert request.replica_id == 1 - index
    line.run()


def test_no_request_waits_for_a_row_where_nothing_more_is_cached() -> None:
    line = line_of(2, executor={"max_num_seqs": 2})
    for number in range(4):
        line.add(prompt_of(number), max_tokens=200)
    for index in (0, 1):
        line.schedule(index)
    assert [replica.num_running for replica in line.scheduler.replicas] == [2, 2]


@pytest.mark.parametrize("rule", ["least_load", "round_robin"])
def test_the_other_rules_know_nothing_of_prefixes(rule: str) -> None:
    line = line_of(2, placement=rule)
    homes = [turn(line, SYSTEM) for _ in range(4)]
    assert homes == ["executor-0", "executor-1"] * 2


def test_round_robin_passes_over_replicas_without_a_row() -> None:
    line = PureLine(FakeExecutor(max_num_seqs=1), FakeExecutor(), placement="round_robin")
    for number in range(6):
        line.add(prompt_of(number), max_tokens=30)
    for _ in range(6):
        for index in (0, 1):
            line.schedule(index)
    assert [replica.num_running for replica in line.scheduler.replicas] == [1, 5]
    line.run()


# -- as they come and go ---------------------------------------------------------------------------------------------


def test_one_that_joins_is_used_though_all_prefixes_are_elsewhere() -> None:
    line = line_of(1, executor={"max_num_seqs": 2})
    turn(line, SYSTEM)
    for number in range(8):
        line.add([*SYSTEM, *prompt_of(number, 20)], max_tokens=50)
    line.schedule(0)
    assert line.scheduler.num_waiting == 6
    joined = line.join(FakeExecutor(max_num_seqs=2))
    line.schedule(joined)
    assert line.scheduler.replicas[joined].num_running == 2, "at its first decision"
    line.run()
    for number in range(8):
        assert len(line.outputs[number + 2]) == 50


def test_what_was_cached_before_a_second_one_came_is_known() -> None:
    line = line_of(1)
    turn(line, SYSTEM)
    line.join(FakeExecutor())
    assert turn(line, [*SYSTEM, 4]) == "executor-0"


def test_nothing_is_left_of_one_that_is_gone() -> None:
    line = line_of(2)
    home = int(turn(line, SYSTEM)[-1])
    assert len(line.fleet.index)
    request = line.add([*SYSTEM, *prompt_of(2)], max_tokens=30)
    line.schedule(home)
    assert request.replica_id == home
    line.leave(home)
    assert len(line.fleet.index) == 0
    line.run()
    assert len(line.outputs[request.request_id]) == 30


def test_after_a_death_its_prefixes_are_looked_for_elsewhere() -> None:
    line = line_of(2)
    home = int(turn(line, SYSTEM)[-1])
    line.die(index=home)
    request = line.add(SYSTEM, max_tokens=3)
    line.schedule(1 - home)
    assert request.replica_id == 1 - home or line.schedule(home) is not None
    line.run()
    assert request.num_cached_tokens == 0


# -- what it is for --------------------------------------------------------------------------------------------------


def test_a_trace_finds_more_at_the_balance_of_round_robin() -> None:
    requests, fleet = trace.Trace(num_requests=240, num_turns=3), trace.Fleet(num_blocks=1024)
    robin, aware = (trace.run(rule, requests, fleet) for rule in ("round_robin", "cache_aware"))
    assert len(robin.ttft) == len(aware.ttft) == 240, "all requests were served"
    assert aware.hit_rate > 1.3 * robin.hit_rate
    assert aware.balance > 0.95
    assert sum(aware.busy) < sum(robin.busy)


# -- the index -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 7)), max_size=60),
    st.integers(0, 8),
    st.sets(st.integers(0, 3)),
    st.integers(0, 4),
)
def test_the_index_is_a_relation(changes: list[tuple[bool, int, int]], most: int, wanted: set[int], num: int) -> None:
    index = PrefixIndex()
    model: set[tuple[int, int]] = set()
    hashes = [bytes([number]) for number in range(8)]
    for is_added, replica_id, number in changes:
        (index.add if is_added else index.remove)(replica_id, hashes[number])
        (model.add if is_added else model.discard)((replica_id, number))
    for replica_id in range(4):
        assert index.hashes_of(replica_id) == {hashes[number] for one, number in model if one == replica_id}
    assert len(index) == len({number for _, number in model})
    depths = {one: max(n for o, n in model if o == one and n < most) + 1 for one, n in model if n < most}
    found = index.depths(hashes[:most], wanted, num)
    assert found.items() <= depths.items()
    assert wanted & depths.keys() <= found.keys()
    others = sorted((depths[one] for one in depths.keys() - wanted), reverse=True)[:num]
    assert sorted((found[one] for one in found.keys() - wanted), reverse=True) == others, "those that hold most"


# -- whatever happens ------------------------------------------------------------------------------------------------


class ChangingMachine(SchedulerMachine):
    """The state machine of the scheduler, with replicas that join and leave for good."""

    @precondition(lambda self: len(self.executors) < 4)
    @rule()
    def join(self) -> None:
        executor = deepcopy(self.executors[0])
        executor.reset()
        self.line.join(executor)
        self.line.wake_all()
        self.executors[:] = self.line.executors

    @precondition(lambda self: len(self.executors) > 1)
    @rule(number=st.integers(0, 3))
    def leave(self, number: int) -> None:
        self.num_losses += 1
        index = self.index_of(number)
        replica = self.line.scheduler.replicas[index]
        self.line.leave(index)
        self.line.forget(replica)
        self.executors[:] = self.line.executors

    @rule(number=st.integers(0, 3), is_leaving=st.booleans())
    def announce(self, number: int, is_leaving: bool) -> None:
        """Announces that an executor is about to end, or that it is not."""
        self.line.scheduler.replicas[self.index_of(number)].is_leaving = is_leaving


TestChangingMachine = ChangingMachine.TestCase
TestChangingMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_a_request_is_passed_on_until_a_replica_takes_it() -> None:
    """One that a replica leaves it to may have decided before, and leave it to yet another one. Being left a request is
    a reason to decide again, without which nothing would run here."""
    arrival = Arrival(0, 0, (1,), 1, 0, 0, frozenset(), False, 0, None, False, "")
    machine = ChangingMachine()
    machine.start(line_of(1, executor={"max_num_seqs": 1, "vocab_size": 50}, max_model_len=30), token_seconds=0.0)
    for _ in range(3):
        machine.join()
    machine.die(number=1, returns=False)
    machine.arrive(arrival, None, n=1, timeout=None)
    machine.run_on(2)
    machine.arrive(arrival, None, n=1, timeout=None)
    machine.wait(0.1)
    machine.schedule(number=0, times=1)
    machine.teardown()
    assert not machine.live


def test_a_request_is_not_forgotten_by_one_that_is_about_to_end() -> None:
    line = WatchedLine(FakeExecutor(), FakeExecutor())
    home = int(turn(line, SYSTEM)[-1])
    request = line.add([*SYSTEM, 5], max_tokens=2)
    line.woken.clear()
    assert line.play(1 - home) is None, "the other one has its prefix"
    line.scheduler.replicas[home].is_leaving = True
    while line.woken:
        line.play(line.scheduler.replicas.index(next(iter(line.woken))))
    assert request.replica_id == 1 - home


def test_all_output_is_as_it_should_be_wherever_it_ran() -> None:
    line = line_of(3)
    for number in range(9):
        line.add(prompt_of(number), max_tokens=12)
    line.run()
    assert all(line.outputs[number + 1] == output_of(number, 12) for number in range(9))
