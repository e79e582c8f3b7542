"""The requests that decode in a step of an executor whose layers are stages of a pipeline.

S stages compute S steps at the same time. A request's next token needs its last one, which the last stage samples, so
it gains nothing by being in a step while its last token is still under way: the first stage would wait, and all behind
it. Requests that decode fall into S cohorts instead, which take turns. No list of their members is kept: a step takes
the requests that are in none of the S - 1 steps before it, but no more than an S-th of all, rounded such that no cohort
is larger by two than another. So a cohort that became too large leaves some requests to the next, and arrivals and ends
are evened out within a round.

The step after these may be decided before the first of them has its tokens: the leader sends them to the first stage
itself. With one stage, this is the rule that all requests may be in the step behind the one that runs.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from pagewire.services.scheduler.core.policy import by_order
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep


class Cohorts:
    """Chooses those that decode in the next step, for one executor."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.size = 0  # of a cohort that is as large as the others; not computed with one stage
        self._last: tuple[int, int] | None = None  # the order of the last one chosen where not all could be

    def of_next_step(self, running: list[Request], in_flight: Sequence[ScheduledStep]) -> list[Request]:
        """Returns the running requests that may be in the next step, in the same order: all that still compute their
        prompt, and a cohort of the others."""
        if self._num_stages == 1:
            return running
        busy = self._under_way(in_flight)
        decoding = [request for request in running if not request.is_prefilling and not request.ends_in_flight]
        self.size = -(-len(decoding) // self._num_stages)
        able = [request for request in decoding if request not in busy]
        most = self._most(len(decoding), in_flight)
        left_out = set(able).difference(self._turns(able, most)) if len(able) > most else ()
        return [request for request in running if request not in busy and request not in left_out]

    def _under_way(self, in_flight: Sequence[ScheduledStep]) -> set[Request]:
        """Returns the requests that have their last token sampled in the last S - 1 steps, as far as these are in
        flight."""
        return {
            request
            for step in self._steps_before(in_flight)
            for request, epoch in zip(step.sampled, step.epochs, strict=True)
            if request.epoch == epoch
        }

    def _steps_before(self, in_flight: Sequence[ScheduledStep]) -> Iterable[ScheduledStep]:
        return islice(reversed(in_flight), self._num_stages - 1)

    def _most(self, num_decoding: int, in_flight: Sequence[ScheduledStep]) -> int:
        """Returns how many requests the next cohort may have: of S cohorts, as many are larger than the others as
        requests are left over."""
        least, num_larger = divmod(num_decoding, self._num_stages)
        larger_before = sum(len(step.sampled) > least for step in self._steps_before(in_flight))
        return max(1, least + (larger_before < num_larger))

    def _turns(self, able: list[Request], most: int) -> list[Request]:
        """Returns `most` of the requests, beginning behind the one that was chosen last."""
        able = sorted(able, key=by_order)
        if self._last is not None:
            last = self._last
            able = [one for one in able if one.order > last] + [one for one in able if one.order <= last]
        chosen = able[:most]
        self._last = chosen[-1].order
        return chosen
