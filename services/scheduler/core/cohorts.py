"""The requests that decode in a step of an executor with its layers in stages of a pipeline.

S stages compute S steps at the same time. A request's next token needs its last one, which the last stage samples, so
it gains nothing from a step while its last token is still in flight: the first stage would wait, and then all others.
Therefore the decoding requests form S cohorts that take turns. No list of members is kept: a step takes requests that
are in none of the S - 1 steps before it, up to an S-th of all, rounded so that cohort sizes differ by at most one. A
cohort that became too large leaves some requests to the next, so arrivals and ends are evened out within a round.

The next step may be decided before the tokens of the oldest step in flight are known, as the leader sends these to the
first stage itself. With one stage, all requests may be in the step after the running one.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from pagewire.services.scheduler.core.policy import by_order
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep


class Cohorts:
    """Chooses the requests that decode in the next step of one executor."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.size = 0  # the average size of a cohort; not computed with one stage
        self._last: tuple[int, int] | None = None  # the order of the last request chosen when not all fit

    def of_next_step(self, running: list[Request], in_flight: Sequence[ScheduledStep]) -> list[Request]:
        """Returns the running requests that may be in the next step, in the same order: all in prefill, and one cohort
        of the others."""
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
        """Returns the requests with a token in flight in the last S - 1 steps."""
        return {
            request
            for step in self._steps_before(in_flight)
            for request, epoch in zip(step.sampled, step.epochs, strict=True)
            if request.epoch == epoch
        }

    def _steps_before(self, in_flight: Sequence[ScheduledStep]) -> Iterable[ScheduledStep]:
        return islice(reversed(in_flight), self._num_stages - 1)

    def _most(self, num_decoding: int, in_flight: Sequence[ScheduledStep]) -> int:
        """Returns the largest size of the next cohort: when S does not divide the requests evenly, some cohorts have
        one more."""
        least, num_larger = divmod(num_decoding, self._num_stages)
        larger_before = sum(len(step.sampled) > least for step in self._steps_before(in_flight))
        return max(1, least + (larger_before < num_larger))

    def _turns(self, able: list[Request], most: int) -> list[Request]:
        """Returns `most` of the requests, starting after the one that was chosen last."""
        able = sorted(able, key=by_order)
        if self._last is not None:
            last = self._last
            able = [one for one in able if one.order > last] + [one for one in able if one.order <= last]
        chosen = able[:most]
        self._last = chosen[-1].order
        return chosen
