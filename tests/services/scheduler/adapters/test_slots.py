"""The slots for adapters: their use by running requests, and the order in which adapters get them."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.adapters.slots import AdapterSlots
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.v1.common_pb2 import SamplingParams
from tests.fakes import FakeExecutor, expected_output
from tests.services.scheduler.pure_line import PureLine
from tests.sweep import examples

ADAPTERS = ("a", "b", "c", "d")
VOCAB = 1000


def executor(max_adapters: int = 2, loaded: tuple[str, ...] = ADAPTERS, **options: Any) -> FakeExecutor:
    made = FakeExecutor(max_adapters=max_adapters, **options)
    made.loaded_adapters |= set(loaded)
    return made


def line_of(*executors: FakeExecutor, **config: Any) -> PureLine:
    return PureLine(*executors, **config)


def expect(line: PureLine, request: Request, max_tokens: int) -> None:
    prompt = request.token_ids[: request.num_prompt_tokens]
    expected = expected_output(prompt, max_tokens, vocab_size=VOCAB, adapter_digest=request.adapter_digest)
    assert line.outputs[request.request_id] == expected


def test_each_request_is_computed_with_its_adapter() -> None:
    line = line_of(executor())
    requests = [line.add([1, 2, 3], max_tokens=5, adapter_digest=digest) for digest in ("", "a", "b", "a")]
    line.run()
    for request in requests:
        expect(line, request, 5)
    assert [step.adapter_slots for step in line.steps if step.adapter_slots] == [[(1, "a"), (2, "b")]]


def test_requests_with_other_adapters_share_no_blocks() -> None:
    line = line_of(executor())
    prompt = list(range(40))
    line.add(prompt, max_tokens=1, adapter_digest="a")
    line.run()
    same, other, none = (line.add(prompt, max_tokens=1, adapter_digest=digest) for digest in ("a", "b", ""))
    line.run()
    assert [request.num_cached_tokens for request in (same, other, none)] == [32, 0, 0]


def test_a_request_without_a_slot_is_passed_over() -> None:
    line = line_of(executor(max_adapters=1))
    first = line.add([1], max_tokens=50, adapter_digest="a")
    second = line.add([2], max_tokens=2, adapter_digest="b")
    third = line.add([3], max_tokens=2)
    line.schedule()
    assert first.replica_id == third.replica_id == 0
    assert second.replica_id is None
    line.run()
    expect(line, second, 2)


def test_an_adapter_with_one_request_is_not_starved() -> None:
    """A slot is reserved for it: of the others, no new request enters."""
    line = line_of(executor(max_adapters=1))
    before = [line.add([i], max_tokens=5, adapter_digest="a") for i in range(3)]
    line.schedule()
    rare = line.add([9], max_tokens=5, adapter_digest="b")
    line.receive()
    line.schedule()
    after = [line.add([10 + i], max_tokens=5, adapter_digest="a") for i in range(3)]
    for _ in range(20):
        line.receive()
        while line.schedule() is not None:
            pass
        if rare.replica_id is not None:
            break
    assert all(request.is_finished for request in before)
    assert not any(request.is_finished or request.replica_id == 0 for request in after)
    line.run()
    assert all(request.finish_reason is FinishReason.LENGTH for request in after)


def test_a_turn_that_was_decided_before_a_reservation_counts() -> None:
    """Heads of several lanes are judged before one of them enters."""
    line = line_of(executor(max_adapters=1))
    line.add([1], max_tokens=50, adapter_digest="a", tenant="t")
    line.schedule()
    for tenant, digest in (("t", "a"), ("u", "a"), ("v", "b"), ("", "b"), ("w", "a")):
        line.add([1], max_tokens=5, adapter_digest=digest, tenant=tenant)
    line.run()


def test_the_slot_that_is_free_soonest_is_reserved() -> None:
    line = line_of(executor(max_adapters=2))
    line.add([1], max_tokens=100, adapter_digest="a")
    line.add([2], max_tokens=4, adapter_digest="b")
    line.schedule()
    rare = line.add([3], max_tokens=1, adapter_digest="c")
    line.receive()
    line.schedule()
    more_a = line.add([4], max_tokens=1, adapter_digest="a")
    more_b = line.add([5], max_tokens=1, adapter_digest="b")
    line.receive()
    line.schedule()
    assert more_a.replica_id == 0 and more_b.replica_id is None and rare.replica_id is None
    line.run()
    assert [slot for step in line.steps for slot in step.adapter_slots][:3] == [(1, "a"), (2, "b"), (2, "c")]


def test_a_reservation_ends_with_its_request() -> None:
    line = line_of(executor(max_adapters=1))
    line.add([1], max_tokens=50, adapter_digest="a")
    line.schedule()
    rare = line.add([2], max_tokens=5, adapter_digest="b")
    line.receive()
    line.schedule()
    line.abort(rare)
    more = line.add([3], max_tokens=5, adapter_digest="a")
    line.receive()
    line.schedule()
    assert more.replica_id == 0
    line.run()


def test_the_least_recently_used_adapter_makes_room() -> None:
    line = line_of(executor(max_adapters=2))
    for digest in ("a", "b", "a", "c", "a"):
        line.add([1], max_tokens=1, adapter_digest=digest)
        line.run()
    assert [slot for step in line.steps for slot in step.adapter_slots] == [(1, "a"), (2, "b"), (2, "c")]


def test_a_request_goes_where_a_slot_is_free() -> None:
    line = line_of(executor(max_adapters=1), executor(max_adapters=1))
    line.add([1], max_tokens=50, adapter_digest="a")
    line.schedule(0)
    line.schedule(1)
    other = line.add([2], max_tokens=5, adapter_digest="b")
    for index in range(2):
        line.schedule(index)
    assert other.replica_id == 1
    line.run()


def test_an_executor_without_the_adapter_does_not_take_its_requests() -> None:
    line = line_of(executor(loaded=()), executor(loaded=("a",)))
    requests = [line.add([i], max_tokens=2, adapter_digest="a") for i in range(5)]
    line.run()
    assert not line.executors[0].adapters and line.executors[1].adapters == {1: "a"}
    for request in requests:
        expect(line, request, 2)


def test_slots_are_empty_after_a_loss() -> None:
    line = line_of(executor())
    request = line.add([1, 2], max_tokens=9, adapter_digest="a")
    line.schedule()
    line.receive()
    line.die()
    line.run()
    expect(line, request, 9)


def request_of(number: int, digest: str) -> Request:
    request = Request(number, [1], SamplingParams(), adapter_digest=digest)
    request.max_num_tokens = 10
    return request


def test_a_forgotten_adapter_is_put_into_a_slot_again() -> None:
    slots = AdapterSlots(1, ["a"])
    first = request_of(1, "a")
    assert slots.enter(first) == 1 and slots.take_changes() == [(1, "a")]
    first.finish(FinishReason.STOP)
    slots.leave(first)
    slots.forget("a")
    second = request_of(2, "a")
    assert not slots.take(second)
    slots.on_loaded("a")
    assert slots.take(second) and slots.enter(second) == 1
    assert slots.take_changes() == [(1, "a")]


def test_a_slot_is_filled_again_after_an_error() -> None:
    """The executor may have been unable to read the adapter."""
    line = line_of(executor(refused_token_id=7))
    for prompt in ([1], [7], [1], [1]):
        line.add(prompt, max_tokens=2, adapter_digest="a")
        line.run()
    assert [slot for step in line.steps for slot in step.adapter_slots] == [(1, "a"), (1, "a")]


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_slots_are_kept_and_everything_ends(data: st.DataObject) -> None:
    """The fake executor fails if a slot that a row uses gets another adapter, or if there is no such slot. All requests
    end, with the tokens of their adapters, whatever ends, is preempted or is lost meanwhile."""
    num_executors = data.draw(st.integers(1, 2))
    num_blocks = data.draw(st.sampled_from([8, 64]))
    made = [
        executor(
            data.draw(st.integers(1, 3)),
            num_blocks=num_blocks,
            max_num_seqs=data.draw(st.integers(1, 5)),
        )
        for _ in range(num_executors)
    ]
    line = line_of(*made, scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority"])))
    with_priority = line.config.scheduling_policy == "priority"
    requests: dict[Request, int] = {}
    aborted = set[Request]()
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "abort", "die"]))
        index = data.draw(st.integers(0, num_executors - 1))
        if action == "add":
            max_tokens = data.draw(st.integers(1, 20))
            digest = data.draw(st.sampled_from(["", *ADAPTERS]))
            prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
            tenant = data.draw(st.sampled_from(["", "t"]))
            priority = data.draw(st.integers(-1, 1)) if with_priority else 0
            request = line.add(prompt, max_tokens=max_tokens, adapter_digest=digest, tenant=tenant, priority=priority)
            requests[request] = max_tokens
        elif action == "abort" and (live := [one for one in requests if not one.is_finished]):
            chosen = data.draw(st.sampled_from(live))
            line.abort(chosen)
            aborted.add(chosen)
        elif action == "die" and not line.crashers and data.draw(st.booleans()):
            line.die(index=index)
        else:
            line.schedule(index)
            if line.num_in_flight(index):
                line.receive(index)
    line.run()
    for request, max_tokens in requests.items():
        if request not in aborted and request not in line.crashers:
            expect(line, request, max_tokens)
