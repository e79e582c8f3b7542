"""Decides how many tokens a step drafts for each of its requests.

A step with N requests yields N tokens; with drafts it yields more, but takes longer. The likely gain of each draft is
learned (`acceptance.py`), and its cost is measured (`costs/draft_costs.py`). Drafts are sorted by their chances, and
the prefix with the most tokens per second is used; all prefixes are compared, including none, because the cost curve
has jumps.

Even if the estimates are wrong, the loss from drafts is bounded by an account in units of plain steps (without drafts).
Each decoding step earns a little, and the results of drafts are credited and charged. No step drafts if that could cost
more than the balance. The account also pays for probes: drafts for a request that has rejected too many recently, which
reveal a change in its text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pagewire.services.scheduler.costs.draft_costs import DraftCosts
from pagewire.services.scheduler.speculation.acceptance import Acceptance, Acceptances
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
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
# After a step without drafts, drafts are not weighed for as many steps as there were such steps, at most one for this
# many requests: weighing takes processor time for each of them. An accepted probe, and another number of requests, end
# the rest.
_REQUESTS_PER_REST = 4
# Some steps have no drafts, to measure what drafts cost: the share of the rate that these steps may cost, and their
# largest share of all steps, which applies while drafts gain little or little is known.
_SHARE_OF_PLAIN, _MOST_PLAIN = 0.01, 0.2
_MAX_TENANTS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a step: how many tokens to draft."""

    drafts: Mapping[int, int] = field(default_factory=dict)  # by request id
    otherwise: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.drafts and not self.otherwise

    def of(self, request: Request) -> int:
        return self.drafts.get(request.request_id, self.otherwise)


NO_DRAFTS = Plan()


class Speculation:
    """Speculation on one executor. An executor that does not report the costs of steps always drafts its maximum."""

    def __init__(self, info: ExecutorInfo, acceptances: Acceptances | None = None) -> None:
        """info: the facts about an executor that drafts. acceptances: those of requests that ran on other executors;
        more are added."""
        self._max_drafts = info.max_draft_tokens
        self._bounds = info.draft_bounds
        self._acceptances = Acceptances() if acceptances is None else acceptances
        self._costs: DraftCosts | None = None
        if info.decode_costs:
            self._costs = DraftCosts(info.decode_costs, info.draft_seconds)
        self._shared: dict[str, Acceptance] = {}  # by tenant
        self._credit = _FIRST_CREDIT
        self._num_steps = self._next_probe = 0
        self._next_look = self._rest = self._num_runners = 0
        self._plain_due = 0.0

    # -- deciding ----------------------------------------------------------------------------------------------------

    def plan(self, runners: Sequence[Request]) -> Plan:
        """Plans the next step, in which these requests may run. Called for each step that can have drafts."""
        self._num_steps += 1
        if len(runners) != self._num_runners:
            self._num_runners, self._next_look, self._rest = len(runners), 0, 0
        is_resting = self._num_steps < self._next_look
        if is_resting and self._num_steps < self._next_probe:
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
        if self._num_steps >= self._next_probe:
            idle = [request for request in decoding if not plan.of(request)]
            return self._probe(self._costs, len(decoding), idle, most, plan) if idle else plan
        return plan

    def _best(self, costs: DraftCosts, decoding: Sequence[Request], most: int) -> Plan:
        """Returns the drafts for the most tokens per second, among those with costs within the credit."""
        num_requests = len(decoding)
        if not _may_pay(costs, num_requests, num_requests, most):
            return NO_DRAFTS
        plain = costs.plain(num_requests)
        best, least_chance = num_requests / plain, 2.0
        gain = num_drafts = 0.0
        longest = 0
        for chance, drafts in _by_chance(self._acceptance(request) for request in decoding):
            for share_found, depth in drafts:
                if depth <= most:
                    gain += chance * share_found
                    num_drafts += share_found
                    longest = max(longest, depth)
            with_drafts = costs.drafted(num_requests, num_drafts, longest) + _asking(costs, num_requests) * plain
            if with_drafts / plain - 1 > self._credit:
                break
            if (num_requests + gain) / with_drafts > best:
                best, least_chance = (num_requests + gain) / with_drafts, chance
        if least_chance > 1:
            return NO_DRAFTS
        share = 1.0 if costs.are_vague else _SHARE_OF_PLAIN / (1 - num_requests / plain / best)
        self._plain_due += min(_MOST_PLAIN, share)
        counts = {
            request.request_id: sum(chance >= least_chance for chance in self._acceptance(request).chances()[:most])
            for request in decoding
        }
        return Plan(counts)

    def _probe(self, costs: DraftCosts, num_requests: int, idle: Sequence[Request], most: int, plan: Plan) -> Plan:
        """Returns the plan with a draft for one of the other requests, in turns, if the account allows it."""
        loss = costs.drafted(num_requests, 1, 1) / costs.plain(num_requests) - 1
        request = idle[self._num_steps % len(idle)]
        share_found = self._acceptance(request).share_found
        if loss * share_found + _asking(costs, num_requests) > self._credit:
            return plan
        is_worth_it = costs.are_vague or _may_pay(costs, num_requests, 1, most)
        every = _PROBE_EVERY if is_worth_it else _PROBE_COSTS_EVERY
        self._next_probe = self._num_steps + max(_PROBE_EVERY, round(every * share_found))
        return Plan({**plan.drafts, request.request_id: 1})

    def _acceptance(self, request: Request) -> Acceptance:
        acceptance = self._acceptances.get(request)
        if acceptance is None:
            shared = self._shared.get(request.tenant.name)
            if shared is None:
                if len(self._shared) >= _MAX_TENANTS:
                    del self._shared[next(iter(self._shared))]
                shared = self._shared[request.tenant.name] = Acceptance(self._max_drafts)
            acceptance = self._acceptances[request] = Acceptance(self._max_drafts, shared)
        return acceptance

    def expected(self, step: ScheduledStep) -> float:
        """Returns how many of the drafts that a step asks for are likely to be found."""
        return sum(asked * self._acceptance(step.sampled[i]).share_found for i, asked in step.drafts_of.items())

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, step: ScheduledStep, result: StepResult, seconds: float) -> None:
        """Learns from a step, and removes drafts that were not found from its work. seconds: its duration; 0:
        unknown."""
        num_asked = num_drafted = num_accepted = longest = 0
        for i, asked in step.drafts_of.items():
            drafted = result.drafted(i)
            accepted = min(drafted, max(0, result.num_tokens[i] - 1))
            num_asked += asked
            num_drafted += drafted
            num_accepted += accepted
            longest = max(longest, drafted)
            if self._costs is not None:
                self._acceptance(step.sampled[i]).learn(asked, drafted, accepted)
        num_requests = step.work.num_decodes - num_asked
        step.work.num_decodes -= num_asked - num_drafted
        if self._costs is None or num_requests <= 0:
            return
        if not num_drafted:
            self._plain_due = 0.0
        if seconds > 0 and not step.work.num_prompt_tokens:
            self._costs.learn(num_requests, num_drafted, longest, seconds)
        else:
            self._costs.forget_last()
        lost = 0.0
        if num_asked:
            with_drafts = self._costs.drafted(num_requests, num_drafted, longest)
            lost = _asking(self._costs, num_requests) + with_drafts / self._costs.plain(num_requests) - 1
        if num_accepted:
            self._next_look = self._rest = 0
        if self._credit < _FIRST_CREDIT:
            self._credit += _EARNED
        self._credit = min(_MOST_CREDIT, self._credit + num_accepted / num_requests - lost)


def _asking(costs: DraftCosts, num_requests: int) -> float:
    """Returns what asking for drafts costs, in plain steps."""
    return min(max(_LEAST_ASKING, _ASKING_S / costs.plain(num_requests)), _MOST_ASKING)


def _may_pay(costs: DraftCosts, num_requests: int, num_able: int, most: int) -> bool:
    """Returns whether correct drafts would pay: one for each request, all for one request, or all for each."""
    plain = num_requests / costs.plain(num_requests)
    return any(
        (num_requests + num_drafts) / costs.drafted(num_requests, num_drafts, longest) > plain
        for num_drafts, longest in ((num_able, 1), (most, most), (num_able * most, most))
    )


def _by_chance(requests: Iterator[Acceptance]) -> Iterator[tuple[float, list[tuple[float, int]]]]:
    """Yields drafts by their chances, best first: (chance, [(share of found drafts, position in the request's drafts),
    ...])."""
    drafts: dict[float, list[tuple[float, int]]] = {}
    for acceptance in requests:
        share_found = acceptance.share_found
        for depth, chance in enumerate(acceptance.chances(), start=1):
            drafts.setdefault(chance, []).append((share_found, depth))
    for chance in sorted(drafts, reverse=True):
        yield chance, drafts[chance]
