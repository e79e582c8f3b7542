"""Speculation: how many tokens steps draft, by what texts accept and what steps cost, where both are stated."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.costs.draft_costs import DraftCosts, Drafted
from pagewire.services.scheduler.speculation.acceptance import Acceptance
from pagewire.services.scheduler.speculation.speculation import Plan, Speculation
from pagewire.services.scheduler.values.executor_info import DraftMethod, ExecutorInfo
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult
from pagewire.services.scheduler.values.tenant import Tenant
from pagewire.v1.common_pb2 import Grammar, SamplingParams, Thinking, TokenSequence
from tests.fakes import FakeExecutor
from tests.services.scheduler.pure_line import PureLine
from tests.sweep import examples

MOST = 6
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

# Seconds of a step of so many tokens.
Curve = Callable[[float], float]
# The chance of a draft behind so many tokens of a text.
Chance = Callable[[int], float]


def memory_bound(num_tokens: float) -> float:
    """A jump to the second token, then little for each, up to many."""
    return 0.010 + (0.0015 if num_tokens > 1 else 0.0) + 0.0005 * num_tokens + 0.001 * max(0.0, num_tokens - 48)


def compute_bound(num_tokens: float) -> float:
    return 0.002 + 0.004 * num_tokens


def changing(num_tokens: int) -> float:
    """Quotes and text of its own in turns."""
    return 0.95 if num_tokens // 100 % 2 else 0.02


def any_text(chance: float) -> Chance:
    return lambda num_tokens: chance


def executor_info(curve: Curve, bounds: tuple[tuple[int, int], ...] = ()) -> ExecutorInfo:
    costs = tuple((size, curve(size)) for size in SIZES)
    return ExecutorInfo(
        1, "fake", 1 << 20, 1000, frozenset(), 20, (), 16, 64, 2048, MOST, decode_costs=costs, draft_bounds=bounds
    )


def decoding(request_id: int) -> Request:
    """A request that has its prompt."""
    request = Request(request_id, [1], SamplingParams())
    request.max_num_tokens = 1 << 20
    return request


def rate(
    curve: Curve,
    chance: Chance,
    num_streams: int,
    *,
    constant: int | None = None,
    num_tokens: int = 4000,
    slower: float = 1.0,
    drafting: float = 0.0,
    told: float = 0.0,
    noise: float = 0.0,
    share_found: float = 1.0,
    asking: float = 0.0,
    measured: Curve | None = None,
    load: Curve = lambda num_tokens: 1.0,
) -> float:
    """Tokens per second with two steps in flight. constant: drafts of each request in each step; None: as is decided.

    measured: what the executor has told of the curve. load: all steps take so many times as long, behind so many tokens
    in all. slower: steps with drafts take so many times what was measured. drafting: seconds for each token of the
    longest draft; told: what the executor has told of that. noise: of all steps' times. share_found: of the requests in
    a step, those for which there are drafts. asking: steps that ask for some take so much longer."""
    info = replace(executor_info(measured or curve), draft_methods=(DraftMethod("ngram", ((1, told),)),))
    speculation, draw, noise_draw = Speculation(info), random.Random(3), random.Random(4)
    requests, lengths = [decoding(i) for i in range(num_streams)], [0] * num_streams
    seconds, in_flight = 0.0, deque[ScheduledStep]()
    while sum(lengths) < num_tokens:
        while len(in_flight) < 2:
            plan = speculation.plan(requests) if constant is None else Plan(otherwise=constant)
            step = ScheduledStep(1, sampled=requests)
            step.drafts_of = {i: drafts for i, request in enumerate(requests) if (drafts := plan.of(request))}
            step.work.num_decodes = num_streams + sum(step.drafts_of.values())
            in_flight.append(step)
        step = in_flight.popleft()
        drafted = [step.drafts_of.get(i, 0) * (draw.random() < share_found) for i in range(num_streams)]
        gains = list[int]()
        for i, count in enumerate(drafted):
            right = itertools.takewhile(lambda _, i=i: draw.random() < chance(lengths[i]), range(count))  # type: ignore[misc]
            gains.append(1 + sum(1 for _ in right))
            lengths[i] += gains[-1]
        took = curve(num_streams + sum(drafted)) * (slower if any(drafted) else 1.0) + drafting * max(drafted)
        took *= 1 + asking if step.drafts_of else 1.0
        took *= noise_draw.uniform(1 - noise, 1 + noise) * load(sum(lengths))
        seconds += took
        if constant is None:
            speculation.learn(step, StepResult(1, [], gains, [], num_drafted=drafted), took)
    return sum(lengths) / seconds


@dataclass(frozen=True)
class Way:
    """A method of an executor. seconds: of a round, by its requests."""

    chance: float
    share_found: float
    seconds: Curve


def rates(curve: Curve, ways: Sequence[Way], num_streams: int, *, is_later: bool = False) -> tuple[float, float]:
    """Tokens per second as is decided, and without drafts, with requests of 96 tokens. is_later: the last method finds
    something only behind a hundred tokens, and nothing is known of its costs."""
    methods = [
        DraftMethod("copy" if i else "ngram", tuple((n, way.seconds(n)) for n in (1, 8))) for i, way in enumerate(ways)
    ]
    if is_later:
        methods[-1] = DraftMethod("later", comes_later=True)
    speculation = Speculation(replace(executor_info(curve), draft_methods=tuple(methods)))
    draw, ids = random.Random(3), itertools.count()
    requests = [decoding(next(ids)) for _ in range(num_streams)]
    left = dict.fromkeys(range(num_streams), 96)
    total, num_steps, seconds = 0, 0, 0.0
    while total < 1200 * num_streams:
        plan, num_steps = speculation.plan(requests), num_steps + 1
        step = ScheduledStep(1, sampled=list(requests), draft_methods=plan.methods)
        step.drafts_of = {i: drafts for i, request in enumerate(requests) if (drafts := plan.of(request))}
        step.work.num_decodes = num_streams + sum(step.drafts_of.values())
        drafted, gains = [0] * num_streams, [1] * num_streams
        by_way: list[list[int]] = [[] for _ in ways]
        for i, asked in step.drafts_of.items():
            method = plan.methods.get(requests[i].request_id, 0)
            is_absent = is_later and method == len(ways) - 1 and total < 100 * num_streams
            drafted[i] = 0 if is_absent else asked * (draw.random() < ways[method].share_found)
            by_way[method].append(drafted[i])
            right = itertools.takewhile(lambda _, way=ways[method]: draw.random() < way.chance, range(drafted[i]))  # type: ignore[misc]
            gains[i] += sum(1 for _ in right)
        rounds = [(way, max(counts), sum(counts)) for way, counts in zip(ways, by_way, strict=True) if any(counts)]
        took = curve(num_streams + sum(drafted)) + 120e-6 * bool(step.drafts_of)
        took += sum(longest * way.seconds(count / longest) for way, longest, count in rounds)
        seconds, total = seconds + took, total + sum(gains)
        speculation.learn(step, StepResult(1, [], gains, [], num_drafted=drafted), took)
        for i, request in enumerate(requests):
            left[request.request_id] -= gains[i]
            if left[request.request_id] <= 0:
                requests[i] = decoding(next(ids))
                left[requests[i].request_id] = 96
    return total / seconds, num_streams / curve(num_streams)


def small_server(num_tokens: float) -> float:
    return 0.0035 + 0.0009 * num_tokens


def large_model(num_tokens: float) -> float:
    return 0.020 + 0.0003 * num_tokens


LOOKUPS = {"chat": (0.2, 0.5), "quotes": (0.85, 1.0), "random": (0.05, 0.3)}  # chance, share found


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("text", LOOKUPS)
@pytest.mark.parametrize("curve", [small_server, large_model])
def test_of_two_methods_the_better_one_drafts(curve: Curve, text: str, num_streams: int, is_later: bool) -> None:
    lookup = Way(*LOOKUPS[text], lambda num_requests: 1e-5)
    copy = Way(0.95, 1.0, lambda num_requests: 0.45 * curve(num_requests))
    decided, plain = rates(curve, [lookup, copy], num_streams, is_later=is_later)
    may_copy = not is_later or num_streams == 1  # a copy that no flag asked for drafts for few requests
    alone = [rates(curve, [way], num_streams)[0] for way in ((lookup, copy) if may_copy else (lookup,))]
    assert decided >= 0.98 * plain
    assert decided >= (0.75 if is_later else 0.9) * max(alone)
    if num_streams == 1 and text == "chat" and not is_later:
        assert decided >= 1.15 * plain


def asked_of_the_copy(restricted: SamplingParams) -> list[int]:
    """Returns the steps of 40 in which a copy drafts, of which a grammar or a budget refuses every draft."""
    methods = (DraftMethod("copy", ((1, 0.0001), (8, 0.0002)), comes_later=True),)
    speculation = Speculation(replace(executor_info(small_server), draft_methods=methods))
    request, steps = Request(1, [1], restricted), list[int]()
    request.max_num_tokens = 1 << 20
    for number in range(40):
        plan = speculation.plan([request])
        step = ScheduledStep(1, sampled=[request], draft_methods=plan.methods)
        step.drafts_of = {0: drafts} if (drafts := plan.of(request)) else {}
        step.work.num_decodes = 1 + sum(step.drafts_of.values())
        speculation.learn(step, StepResult(1, [], [1], [], num_drafted=[0]), small_server(1))
        steps += [number] * bool(step.drafts_of)
    return steps


def test_drafts_that_a_grammar_refuses_say_nothing_about_the_method() -> None:
    assert len(asked_of_the_copy(SamplingParams())) == 1, "the copy is not prepared"
    grammar = SamplingParams(grammar=Grammar(regex="a+"))
    budget = SamplingParams(thinking=Thinking(end=TokenSequence(token_ids=[5]), budget=3))
    assert min(len(asked_of_the_copy(one)) for one in (grammar, budget)) > 5


class Looked(list[Request]):
    """Requests that count how often they are looked at."""

    times = 0

    def __iter__(self) -> Iterator[Request]:
        self.times += 1
        return super().__iter__()


def test_a_method_that_cannot_draft_disturbs_no_rest() -> None:
    methods = (DraftMethod("ngram", ((1, 0.0),)), DraftMethod("copy", comes_later=True))
    speculation = Speculation(replace(executor_info(compute_bound), draft_methods=methods))
    requests = Looked(decoding(i) for i in range(16))  # too many for the copy
    for _ in range(200):
        speculation.plan(requests)
    assert requests.times < 100


def test_a_method_that_is_refused_costs_little_beside_another() -> None:
    ways = [Way(0.02, 0.5, lambda num_requests: 1e-5), Way(0.02, 1.0, lambda num_requests: 0.5 * large_model(1))]
    decided, plain = rates(large_model, ways, 1)
    assert decided >= 0.98 * plain


def test_each_request_of_a_step_drafts_by_its_method() -> None:
    """One quotes; the other does not, and a round for it alone takes less than one for both."""
    rounds = ((1, 0.001), (2, 0.004))
    methods = DraftMethod("ngram", ((1, 1e-5),)), DraftMethod("copy", rounds)
    speculation = Speculation(replace(executor_info(large_model), draft_methods=methods))
    requests = [decoding(i) for i in range(2)]
    plans = list[Plan]()
    for _ in range(300):
        plan = speculation.plan(requests)
        plans.append(plan)
        step = ScheduledStep(1, sampled=requests, draft_methods=plan.methods)
        step.drafts_of = {i: drafts for i, request in enumerate(requests) if (drafts := plan.of(request))}
        step.work.num_decodes = 2 + sum(step.drafts_of.values())
        by_copy = [drafts for i, drafts in step.drafts_of.items() if plan.methods.get(i)]
        refused = plan.of(requests[1]) if not plan.methods.get(1) else 0
        gains = [1 + plan.of(requests[0]), 1 + plan.of(requests[1]) - refused]
        took = large_model(step.work.num_decodes) + (dict(rounds)[len(by_copy)] * max(by_copy) if by_copy else 0.0)
        drafted = [plan.of(request) for request in requests]
        speculation.learn(step, StepResult(1, [], gains, [], num_drafted=drafted), took)
    assert sum(plan.methods == {0: 0, 1: 1} for plan in plans[-50:]) > 30


@cache
def constants(curve: Curve, chance: float, num_streams: int) -> list[float]:
    return [rate(curve, any_text(chance), num_streams, constant=number) for number in range(MOST + 1)]


@pytest.mark.parametrize("num_streams", [1, 8, 32])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("curve", [memory_bound, compute_bound])
def test_it_is_as_fast_as_the_best_constant_number(curve: Curve, chance: float, num_streams: int) -> None:
    assert rate(curve, any_text(chance), num_streams) >= 0.96 * max(constants(curve, chance, num_streams))


@settings(deadline=None, max_examples=examples(20))
@given(
    chance=st.floats(0, 1),
    num_streams=st.sampled_from([1, 2, 5, 16]),
    jump=st.floats(0, 1),
    per_token=st.floats(0, 1.2),
    slower=st.floats(0.9, 1.6),
    drafting=st.sampled_from([0.0, 0.003]),
    told=st.sampled_from([0.0, 0.003, 0.1]),
    noise=st.sampled_from([0.0, 0.3]),
    share_found=st.sampled_from([1.0, 0.3, 0.0]),
    asking=st.sampled_from([0.0, 0.05]),
)
def test_it_never_costs_much(chance: float, num_streams: int, jump: float, per_token: float, **others: Any) -> None:
    """Whatever is accepted and whatever steps cost, also where that is not what was measured."""

    def curve(num_tokens: float) -> float:
        return 0.01 * (1 + jump * (num_tokens > 1) + per_token * (num_tokens - 1))

    measure = partial(rate, curve, any_text(chance), num_streams, num_tokens=4000 + 1000 * num_streams, **others)
    assert measure() >= 0.97 * measure(constant=0)


@pytest.mark.parametrize("told", [0.0, 0.002, 0.03])
def test_what_a_proposer_takes_is_learned(told: float) -> None:
    """Other work ran on the machine while the costs were measured."""
    measure = partial(rate, memory_bound, any_text(0.9), 1, drafting=0.002, told=told)
    assert measure() >= 0.93 * max(measure(constant=number) for number in range(MOST + 1))


def off_by(factor: float, curve: Curve) -> Curve:
    """Measured while others were busy, or less than in service: all but a lone token took so many times as long."""
    return lambda num_tokens: curve(num_tokens) * (factor if num_tokens > 1 else 1.0)


@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("off", [0.5, 2.0])
def test_costs_may_be_twice_or_half_what_was_measured(off: float, chance: float, num_streams: int) -> None:
    """Steps are at the worst as fast as without drafts, and never far from the best number of them."""
    curve = partial(off_by, off)
    measure = partial(rate, memory_bound, any_text(chance), num_streams, drafting=0.002, noise=0.3)
    decided = measure(measured=curve(memory_bound), told=0.002 * off)
    plain, *others = (measure(constant=number) for number in range(MOST + 1))
    assert decided >= 0.97 * plain
    assert decided >= 0.9 * max(others)


def test_a_busier_machine_is_no_reason_to_draft_less() -> None:
    """All steps take twice as long as at start, not only those with drafts, as is known from the first answers on."""
    measure = partial(rate, memory_bound, any_text(0.97), 1, drafting=0.005, told=0.005, load=lambda num_tokens: 2.0)
    assert measure(num_tokens=600) >= 0.95 * measure(num_tokens=600, constant=MOST)


@pytest.mark.parametrize("num_streams", [1, 8])
def test_it_follows_a_text_that_changes(num_streams: int) -> None:
    decided = rate(memory_bound, changing, num_streams)
    assert decided >= max(rate(memory_bound, changing, num_streams, constant=number) for number in range(MOST + 1))


def test_what_is_not_found_costs_nothing_and_says_nothing() -> None:
    """A request of which little is found is asked on, as it accepts what is."""
    plain, decided = (
        rate(memory_bound, any_text(0.95), 1, constant=constant, share_found=0.1) for constant in (0, None)
    )
    assert decided > 1.3 * plain


def test_requests_of_one_step_have_different_numbers() -> None:
    speculation, requests = Speculation(executor_info(memory_bound)), [decoding(i) for i in range(2)]
    for _ in range(40):
        plan = speculation.plan(requests)
        drafts = [plan.of(request) for request in requests]
        step = ScheduledStep(1, sampled=requests, drafts_of={i: count for i, count in enumerate(drafts) if count})
        step.work.num_decodes = 2 + sum(drafts)
        speculation.learn(
            step, StepResult(1, [], [1 + drafts[0], 1], [], num_drafted=drafts), memory_bound(step.work.num_decodes)
        )
    plan = speculation.plan(requests)
    assert plan.of(requests[0]) == MOST
    assert plan.of(requests[1]) <= 2


def test_another_tenants_texts_do_not_count() -> None:
    speculation = Speculation(executor_info(memory_bound))
    refusing, accepting = (
        Request(1, [1], SamplingParams(), tenant=Tenant("a")),
        Request(2, [1], SamplingParams(), tenant=Tenant("b")),
    )
    for request in (refusing, accepting):
        request.max_num_tokens = 1 << 20
        for _ in range(20):
            drafts = max(1, speculation.plan([request]).of(request))
            step = ScheduledStep(1, sampled=[request], drafts_of={0: drafts})
            step.work.num_decodes = 1 + drafts
            gain = 1 if request is refusing else 1 + drafts
            speculation.learn(step, StepResult(1, [], [gain], [], num_drafted=[drafts]), memory_bound(1 + drafts))
    newcomers = [Request(i, [1], SamplingParams(), tenant=Tenant(tenant)) for i, tenant in ((3, "a"), (4, "b"))]
    for request in newcomers:
        request.max_num_tokens = 1 << 20
    plan = next(plan for _ in range(3) if (plan := speculation.plan(newcomers)).drafts)  # now and then it makes none
    assert plan.of(newcomers[1]) > 2 >= plan.of(newcomers[0])


def test_flags_bound_drafts_by_load() -> None:
    speculation = Speculation(executor_info(memory_bound, ((2, 1), (3, 0))))
    requests = [decoding(i) for i in range(3)]
    assert [max(map(speculation.plan(requests[:n]).of, requests)) for n in (1, 2, 3)] == [MOST, 1, 0]


def test_an_executor_that_tells_no_costs_is_asked_for_all() -> None:
    line = PureLine(FakeExecutor(max_draft_tokens=4, draw_gain=lambda most: 1))
    line.add([1, 2, 3], max_tokens=40, ignore_eos=True)
    line.run()
    drafts = [max(step.drafts_of.values(), default=0) for step in line.steps]
    assert max(drafts) == 4 and drafts.count(4) > 25


def test_a_line_stops_drafting_what_is_refused_and_its_work_is_what_was_computed() -> None:
    executor = FakeExecutor(num_blocks=1024, max_draft_tokens=MOST, draw_gain=lambda most: 1)
    executor.decode_costs = executor_info(memory_bound).decode_costs
    line = PureLine(executor)
    line.add([1, 2, 3], max_tokens=300, ignore_eos=True)
    line.run()
    drafts = [sum(step.drafts_of.values()) for step in line.steps]
    assert sum(drafts[:20]) > 0
    assert sum(map(bool, drafts[100:])) < 0.15 * len(drafts[100:])


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    costs = DraftCosts(((1, 0.010), (2, 0.012), (8, 0.018), (16, 0.034)), [((1, 0.003),)])
    assert costs.plain(1) == pytest.approx(0.010)
    assert costs.plain(5) == pytest.approx(0.015)
    assert costs.plain(20) == pytest.approx(0.042)
    assert costs.drafted(1, [Drafted(0, 4, 4)]) == pytest.approx(0.015 + 0.012)


def test_costs_are_corrected_by_steps() -> None:
    costs = DraftCosts(((1, 0.010), (8, 0.017)), [((1, 0.0),)])
    drafts = [Drafted(0, 4, 2)]
    for _ in range(100):
        costs.learn(4, [], 2 * 0.013)  # contexts are long
        costs.learn(4, drafts, 2 * 1.2 * 0.017)  # and drafts cost more than tokens do
    assert costs.drafted(4, drafts) / costs.plain(4) == pytest.approx(1.2 * 0.017 / 0.013, rel=0.01)


def test_costs_of_a_method_and_a_size_say_nothing_of_others() -> None:
    costs = DraftCosts(((1, 0.010), (8, 0.017)), [((1, 0.0),), ((1, 0.004), (8, 0.015))])
    others = [(1, [Drafted(0, 4, 4)]), (8, [Drafted(1, 8, 1)])]
    before = [costs.drafted(*other) for other in others]
    for _ in range(100):
        costs.learn(1, [], 0.010)
        costs.learn(1, [Drafted(1, 2, 2)], 0.030)
    assert costs.drafted(1, [Drafted(1, 2, 2)]) == pytest.approx(0.030, rel=0.01)
    assert [costs.drafted(*other) for other in others] == before


def test_both_methods_of_a_step_are_corrected() -> None:
    costs = DraftCosts(((1, 0.010), (8, 0.017)), [((1, 0.0),), ((1, 0.004), (8, 0.006))])
    drafts = [Drafted(0, 2, 2), Drafted(1, 2, 2)]
    for _ in range(100):
        costs.learn(2, [], 0.011)
        costs.learn(2, drafts, 0.040)
    assert costs.drafted(2, drafts) == pytest.approx(0.040, rel=0.01)


def test_one_measured_size_is_enough_to_start_with() -> None:
    assert DraftCosts(((1, 0.010),)).plain(8) == pytest.approx(0.010)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, MOST), st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_chances_fall_and_are_chances(steps: list[tuple[int, float, float]]) -> None:
    acceptance = Acceptance(MOST, Acceptance(MOST))
    for asked, found, right in steps:
        drafted = round(asked * found)
        acceptance.learn(asked, drafted, round(drafted * right))
    chances = list(acceptance.chances())
    assert all(0 <= later <= earlier <= 1 for earlier, later in itertools.pairwise(chances))
    assert 0 <= acceptance.share_found <= 1


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.95])
def test_chances_are_found(chance: float) -> None:
    draw, shared = random.Random(1), Acceptance(MOST)
    for _ in range(300):
        right = itertools.takewhile(lambda _: draw.random() < chance, range(MOST))
        shared.learn(MOST, MOST, sum(1 for _ in right))
    assert shared.chances()[0] == pytest.approx(chance, abs=0.1)
    assert Acceptance(MOST, shared).chances() == shared.chances()  # of an unknown one
