"""Decides how many tokens a step drafts for each of its requests.

A step with N requests yields N tokens; with drafts it yields more, but takes longer. The likely gain of each draft is
learned (`acceptance.py`), and its cost is measured (`costs/draft_costs.py`), both for each method of the executor.
Drafts are sorted by their chances, and the prefix with the most tokens per second is used; all prefixes are compared,
including none, because the cost curve has jumps. All requests draft by one method, or each by the one that suits it.

Even if the estimates are wrong, the loss from drafts is bounded by an account in units of plain steps (without drafts).
Each decoding step earns a little, and the results of drafts are credited and charged. No step drafts if that could cost
more than the balance. The account also pays for probes: drafts for a request that has rejected too many recently, which
reveal a change in its text, and drafts by another method than the best one so far.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pagewire.services.scheduler.costs.draft_costs import DraftCosts, Drafted
from pagewire.services.scheduler.speculation.acceptance import Acceptance, Acceptances
from pagewire.services.scheduler.values.executor_info import DraftMethod, ExecutorInfo
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult

# The account, in plain steps: the first balance, which is also the most without gains; the earnings of each step; and
# the most with gains from drafts, which bounds the loss when a text changes.
_FIRST_CREDIT, _EARNED, _MOST_CREDIT = 2.0, 0.01, 16.0
# The seconds that asking for drafts takes, even if none are found: the executor searches for them, and assembles the
# step again if there are none. In plain steps, the cost is assumed to be within the bounds.
_ASKING_S, _LEAST_ASKING, _MOST_ASKING = 120e-6, 0.02, 0.05
# The fewest steps between two probes, in general, and while not even correct drafts would pay, although costs may
# change.
_PROBE_EVERY, _PROBE_COSTS_EVERY = 4, 64
# The fewest steps between two probes of another method for a request that drafts.
_PROBE_OTHER_EVERY = 24
# A method that is not prepared yet finds nothing, and is asked again after this many steps.
_ABSENT_STEPS = 64
# The most requests of a step for which such a method drafts, which no flag asked for: with 8 on two cores, a copy of
# the model gained nothing, and steps took up to 7 % more processor time.
_MOST_LATER = 4
# After a step without drafts, drafts are not weighed for as many steps as there were such steps, at most one for this
# many requests: weighing takes processor time for each of them. An accepted probe, and another number of requests, end
# the rest.
_REQUESTS_PER_REST = 4
# Some steps have no drafts, to measure what drafts cost: the share of the rate that these steps may cost, and their
# largest share of all steps, which applies while drafts gain little or little is known.
_SHARE_OF_PLAIN, _MOST_PLAIN = 0.01, 0.2
_MAX_TENANTS = 1024
_LOOKUPS = ("ngram", "suffix")  # methods that find their drafts in texts


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a step: how many tokens to draft."""

    drafts: Mapping[int, int] = field(default_factory=dict)  # by request id
    otherwise: int = 0
    methods: Mapping[int, int] = field(default_factory=dict)  # by request id; by default the first

    @property
    def is_empty(self) -> bool:
        return not self.drafts and not self.otherwise

    def of(self, request: Request) -> int:
        return self.drafts.get(request.request_id, self.otherwise)


NO_DRAFTS = Plan()
# Of an executor that states none.
_ONLY_METHOD = (DraftMethod("ngram", ((1, 0.0),)),)


class Speculation:
    """Speculation on one executor. An executor that does not report the costs of steps always drafts its maximum."""

    def __init__(self, info: ExecutorInfo, acceptances: Acceptances | None = None) -> None:
        """info: the facts about an executor that drafts. acceptances: those of requests that ran on other executors;
        more are added."""
        self._max_drafts = info.max_draft_tokens
        self._bounds = info.draft_bounds
        self._methods = info.draft_methods or _ONLY_METHOD
        self._acceptances = Acceptances() if acceptances is None else acceptances
        self._costs: DraftCosts | None = None
        if info.decode_costs:
            self._costs = DraftCosts(info.decode_costs, [method.rounds for method in self._methods])
        self._shared: dict[tuple[str, str], Acceptance] = {}  # by tenant and method
        self._credit = _FIRST_CREDIT
        self._num_steps = self._next_other = self._turn = 0
        # By method: the step of the next probe, and the one from which on the method may find something.
        self._next_probe, self._absent_until = [0] * len(self._methods), [0] * len(self._methods)
        self._next_look = self._rest = self._num_runners = 0
        self._plain_due = 0.0

    # -- deciding ----------------------------------------------------------------------------------------------------

    def plan(self, runners: Sequence[Request]) -> Plan:
        """Plans the next step, in which these requests may run. Called for each step that can have drafts."""
        self._num_steps += 1
        if len(runners) != self._num_runners:
            self._num_runners, self._next_look, self._rest = len(runners), 0, 0
        is_resting = self._num_steps < self._next_look
        if is_resting and not self._may_probe(len(runners)):
            return NO_DRAFTS
        decoding = [request for request in runners if not request.is_prefilling and not request.ends_in_flight]
        most = min([self._max_drafts, *(drafts for size, drafts in self._bounds if len(decoding) >= size)])
        if not most or not decoding:
            return NO_DRAFTS
        if self._costs is None:
            return Plan(otherwise=most)
        plan = NO_DRAFTS if is_resting else self._best(self._costs, decoding, most)
        if plan is NO_DRAFTS and not is_resting:
            self._rest = min(self._rest + 1, len(runners) // _REQUESTS_PER_REST)
            self._next_look = self._num_steps + 1 + self._rest
        if self._plain_due >= 1:
            self._plain_due = 0.0
            return NO_DRAFTS
        return self._probe(self._costs, decoding, most, plan)

    def _may_probe(self, num_requests: int) -> bool:
        """Returns whether it is time for a probe of a method that can draft."""
        due = map(max, self._next_probe, self._absent_until)
        return any(self._num_steps >= at and self._fits(method, num_requests) for method, at in enumerate(due))

    def _best(self, costs: DraftCosts, decoding: Sequence[Request], most: int) -> Plan:
        """Returns the drafts for the most tokens per second, among those with costs within the credit."""
        num_requests = len(decoding)
        plain = costs.plain(num_requests)
        able = [
            method
            for method, absent_until in enumerate(self._absent_until)
            if self._num_steps >= absent_until
            and self._fits(method, num_requests)
            and _may_pay(costs, num_requests, num_requests, most, method)
        ]
        best, least_chance, chosen = num_requests / plain, 2.0, list[int]()
        for methods in self._choices(costs, decoding, most, able):
            rate, chance = self._best_prefix(costs, decoding, most, methods)
            if rate > best:
                best, least_chance, chosen = rate, chance, methods
        if not chosen:
            return NO_DRAFTS
        is_vague = any(costs.are_vague(method, num_requests) for method in {*chosen})
        share = 1.0 if is_vague else _SHARE_OF_PLAIN / (1 - num_requests / plain / best)
        self._plain_due += min(_MOST_PLAIN, share)
        counts = {
            request.request_id: sum(
                chance >= least_chance for chance in self._acceptance(request, method).chances()[:most]
            )
            for request, method in zip(decoding, chosen, strict=True)
        }
        return Plan(counts, methods=_named(decoding, chosen))

    def _choices(
        self, costs: DraftCosts, decoding: Sequence[Request], most: int, able: Sequence[int]
    ) -> Iterator[list[int]]:
        """Yields methods of the requests: the same for all, or for each the one that would be best if all used it."""
        num_requests = len(decoding)
        for method in able:
            yield [method] * num_requests
        if len(able) < 2 or num_requests < 2:
            return
        seconds = {method: costs.drafted(num_requests, [Drafted(method, num_requests * most, most)]) for method in able}

        def rate(request: Request, method: int) -> float:
            acceptance = self._acceptance(request, method)
            return (1 + acceptance.share_found * sum(acceptance.chances()[:most])) / seconds[method]

        chosen = [max(able, key=lambda method, request=request: rate(request, method)) for request in decoding]  # type: ignore[misc]
        if len({*chosen}) > 1:
            yield chosen

    def _best_prefix(
        self, costs: DraftCosts, decoding: Sequence[Request], most: int, methods: Sequence[int]
    ) -> tuple[float, float]:
        """Returns the tokens per second of the best prefix, and the least chance of its drafts."""
        num_requests = len(decoding)
        plain = costs.plain(num_requests)
        asking = _asking(costs, num_requests) * plain
        best, least_chance, gain = 0.0, 2.0, 0.0
        counts, longest = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
        pairs = zip(decoding, methods, strict=True)
        for chance, drafts in _by_chance((method, self._acceptance(request, method)) for request, method in pairs):
            for method, share_found, depth in drafts:
                if depth <= most:
                    gain += chance * share_found
                    counts[method] += share_found
                    longest[method] = max(longest[method], depth)
            with_drafts = costs.drafted(num_requests, _drafted(counts, longest)) + asking
            if with_drafts / plain - 1 > self._credit:
                break
            if (num_requests + gain) / with_drafts > best:
                best, least_chance = (num_requests + gain) / with_drafts, chance
        return best, least_chance

    def _probe(self, costs: DraftCosts, decoding: Sequence[Request], most: int, plan: Plan) -> Plan:
        """Returns the plan with a draft for one request that has none, or none by that method, in turns, if it is time
        for one and the account allows it."""
        num_requests = len(decoding)
        self._turn = (self._turn + 1) % len(self._methods)
        method = self._turn
        is_due = self._num_steps >= max(self._next_probe[method], self._absent_until[method])
        if not is_due or not self._fits(method, num_requests):
            return plan
        idle = [request for request in decoding if not plan.of(request)]
        others = [request for request in decoding if plan.methods.get(request.request_id, 0) != method]
        if not idle and (not others or self._num_steps < self._next_other):
            return plan
        among = idle or others
        loss = costs.drafted(num_requests, [Drafted(method, 1, 1)]) / costs.plain(num_requests) - 1
        request = among[self._num_steps % len(among)]
        share_found = self._acceptance(request, method).share_found
        if loss * share_found + _asking(costs, num_requests) > self._credit:
            return plan
        is_worth_it = costs.are_vague(method, num_requests) or _may_pay(costs, num_requests, 1, most, method)
        every = _PROBE_EVERY if is_worth_it else _PROBE_COSTS_EVERY
        self._next_probe[method] = self._num_steps + max(_PROBE_EVERY, round(every * share_found))
        if not idle:
            self._next_other = self._num_steps + _PROBE_OTHER_EVERY
        return Plan({**plan.drafts, request.request_id: 1}, methods={**plan.methods, **_named([request], [method])})

    def _fits(self, method: int, num_requests: int) -> bool:
        return num_requests <= _MOST_LATER or not self._methods[method].comes_later

    def _acceptance(self, request: Request, method: int) -> Acceptance:
        of_request = self._acceptances.get(request)
        if of_request is None:
            of_request = self._acceptances[request] = {}
        name = self._methods[method].name
        acceptance = of_request.get(name)
        if acceptance is None:
            key = (request.tenant.name, name)
            shared = self._shared.get(key)
            if shared is None:
                if len(self._shared) >= _MAX_TENANTS:
                    del self._shared[next(iter(self._shared))]
                shared = self._shared[key] = Acceptance(self._max_drafts)
            by_model = name not in _LOOKUPS
            acceptance = of_request[name] = Acceptance(self._max_drafts, shared, by_model=by_model)
        return acceptance

    def expected(self, step: ScheduledStep) -> float:
        """Returns how many of the drafts that a step asks for are likely to be found."""
        found = 0.0
        for i, asked in step.drafts_of.items():
            request = step.sampled[i]
            found += asked * self._acceptance(request, step.draft_methods.get(request.request_id, 0)).share_found
        return found

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, step: ScheduledStep, result: StepResult, seconds: float) -> None:
        """Learns from a step, and removes drafts that were not found from its work. seconds: its duration; 0:
        unknown."""
        num_asked = num_accepted = 0
        counts, longest = dict[int, float](), dict[int, int]()
        for i, asked in step.drafts_of.items():
            method = step.draft_methods.get(step.sampled[i].request_id, 0)
            num_asked += asked
            num_accepted += min(drafted := result.drafted(i), max(0, result.num_tokens[i] - 1))
            counts[method] = counts.get(method, 0.0) + drafted
            longest[method] = max(longest.get(method, 0), drafted)
        num_drafted = int(sum(counts.values()))
        num_requests = step.work.num_decodes - num_asked
        step.work.num_decodes -= num_asked - num_drafted
        if self._costs is None:
            return
        self._learn_acceptances(step, result)
        if num_requests <= 0:
            return
        drafts = _drafted(counts, longest)
        if not drafts:
            self._plain_due = 0.0
        if seconds > 0 and not step.work.num_prompt_tokens:
            self._costs.learn(num_requests, drafts, seconds)
        else:
            self._costs.forget_last()
        lost = 0.0
        if num_asked:
            with_drafts = self._costs.drafted(num_requests, drafts)
            lost = _asking(self._costs, num_requests) + with_drafts / self._costs.plain(num_requests) - 1
        if num_accepted:
            self._next_look = self._rest = 0
        if self._credit < _FIRST_CREDIT:
            self._credit += _EARNED
        self._credit = min(_MOST_CREDIT, self._credit + num_accepted / num_requests - lost)

    def _learn_acceptances(self, step: ScheduledStep, result: StepResult) -> None:
        found = dict[int, int]()  # by method
        for i in step.drafts_of:
            request = step.sampled[i]
            if not _may_lose_drafts(request):  # else that there are none says nothing about the method
                method = step.draft_methods.get(request.request_id, 0)
                found[method] = found.get(method, 0) + result.drafted(i)
        for method, num_drafted in found.items():
            is_absent = self._methods[method].comes_later and not num_drafted
            self._absent_until[method] = self._num_steps + _ABSENT_STEPS if is_absent else 0
        for i, asked in step.drafts_of.items():
            request = step.sampled[i]
            method = step.draft_methods.get(request.request_id, 0)
            if self._num_steps >= self._absent_until[method]:
                drafted = result.drafted(i)
                accepted = min(drafted, max(0, result.num_tokens[i] - 1))
                self._acceptance(request, method).learn(asked, drafted, accepted)


def _may_lose_drafts(request: Request) -> bool:
    """Returns whether a grammar or a budget of thinking refuses drafts before they are checked."""
    return request.has_grammar or request.sampling_params.thinking.HasField("budget")


def _drafted(counts: Mapping[int, float], longest: Mapping[int, int]) -> list[Drafted]:
    return [Drafted(method, count, longest[method]) for method, count in counts.items() if count]


def _named(requests: Sequence[Request], methods: Sequence[int]) -> dict[int, int]:
    return {request.request_id: method for request, method in zip(requests, methods, strict=True)}


def _asking(costs: DraftCosts, num_requests: int) -> float:
    """Returns what asking for drafts costs, in plain steps."""
    return min(max(_LEAST_ASKING, _ASKING_S / costs.plain(num_requests)), _MOST_ASKING)


def _may_pay(costs: DraftCosts, num_requests: int, num_able: int, most: int, method: int) -> bool:
    """Returns whether correct drafts would pay: one for each request, all for one request, or all for each."""
    plain = num_requests / costs.plain(num_requests)
    return any(
        (num_requests + num_drafts) / costs.drafted(num_requests, [Drafted(method, num_drafts, longest)]) > plain
        for num_drafts, longest in ((num_able, 1), (most, most), (num_able * most, most))
    )


def _by_chance(acceptances: Iterable[tuple[int, Acceptance]]) -> Iterator[tuple[float, list[tuple[int, float, int]]]]:
    """Yields drafts by their chances, best first: (chance, [(method, share of found drafts, position in the request's
    drafts), ...])."""
    drafts: dict[float, list[tuple[int, float, int]]] = {}
    for method, acceptance in acceptances:
        share_found = acceptance.share_found
        for depth, chance in enumerate(acceptance.chances(), start=1):
            drafts.setdefault(chance, []).append((method, share_found, depth))
    for chance in sorted(drafts, reverse=True):
        yield chance, drafts[chance]
