"""Requests that may be the reason why executors fail: found within two failures, at no more than a pause for others.

A failure says nothing about its cause, so whoever was in flight becomes a suspect, until it has got beyond what was in
flight then. A suspect runs in steps of its own, so if it fails again it is the cause, and ends. Halving the suspects
instead would need one more failure for each halving, and every failure takes everybody's KV with it.

Where an executor is gone without a word, nobody knows whether a step or a `kill -9` was the reason. The second time
then says less: a suspect has a third try, unless the successor tells that the process has ended by its own doing.
"""

from collections.abc import Iterable, Sequence

from pagewire.services.scheduler.core.loss import Loss
from pagewire.services.scheduler.core.request import Request, RequestStatus
from pagewire.services.scheduler.core.step import ScheduledStep
from pagewire.v1.common_pb2 import SamplingParams

# Failures that a request can cause: one among others, one alone.
MAX_LOSSES = 2
# Where none of them says why.
MAX_SILENT_LOSSES = 3
# Most tokens that one may have had in flight that was preempted meanwhile.
_TOKENS_IN_FLIGHT = 2


def charge(requests: Sequence[Request], steps: Iterable[ScheduledStep], loss: Loss) -> list[Request]:
    """An executor was lost with these steps in flight. Makes suspects of those of the live requests that they ran.

    Returns:
        The one that it was lost to once more, now alone, with all suspects that ask for just the same.
    """
    if not loss.may_be_a_requests_fault:
        return []
    in_flight_ids = {request_id for step in steps for request_id in step.request_ids}
    charged = [request for request in requests if request.request_id in in_flight_ids]
    is_alone = len(in_flight_ids) == len(charged) == 1
    if is_alone and is_suspect(charged[0]):
        (culprit,) = charged
        culprit.num_losses += 1
        return convict(culprit, requests) if loss.is_told or culprit.num_losses >= MAX_SILENT_LOSSES else []
    for request in charged:
        in_flight = request.num_output_placeholders if request.status is RequestStatus.RUNNING else _TOKENS_IN_FLIGHT
        request.suspect_until = request.num_tokens + max(1, in_flight)
        request.num_losses = 1
        request.awaited = None
    return []


def convict(culprit: Request, requests: Sequence[Request]) -> list[Request]:
    """Who of the live requests ends with it."""
    return [request for request in requests if request is culprit or _is_alike(request, culprit)]


def is_doubtful(request: Request) -> bool:
    """Whether an executor was lost to it alone, without a word, and it has not been cleared since."""
    return is_suspect(request) and request.num_losses >= MAX_LOSSES


def is_suspect(request: Request) -> bool:
    return len(request.token_ids) < request.suspect_until


def _is_alike(request: Request, culprit: Request) -> bool:
    """Whether it is, to the executor, the same prompt again: another output of the same request (n > 1), mostly."""
    if not is_suspect(request) or culprit.num_output_tokens or request.token_ids != culprit.token_ids:
        return False
    end = request.num_prompt_tokens
    if request.images.keys(0, end) != culprit.images.keys(0, end) or request.yields_vector != culprit.yields_vector:
        return False
    return _without_seed(request) == _without_seed(culprit)


def _without_seed(request: Request) -> SamplingParams:
    params = SamplingParams()
    params.CopyFrom(request.sampling_params)
    params.ClearField("seed")
    return params


class Quarantine:
    """Keeps a suspect out of the steps of others: at most one runs on a replica, in turns with them, and a step of the
    one kind is not decided before those of the other are done."""

    def __init__(self) -> None:
        self._suspect: Request | None = None
        self._is_others_turn = False

    @property
    def is_closed(self) -> bool:
        """Whether a suspect runs: nobody else may enter."""
        suspect = self._suspect
        if suspect is not None and not (suspect.status is RequestStatus.RUNNING and is_suspect(suspect)):
            self._suspect = None
        return self._suspect is not None

    def runners(self, running: list[Request], is_suspect_due: bool, is_idle: bool) -> list[Request]:
        """Those of the running requests that may run in the next step.

        is_suspect_due: one waits first in line, and there is room for it: the others pause, after a step of theirs,
        until it has entered. is_idle: no step is in flight.
        """
        if not self.is_closed:
            if is_suspect_due and not self._is_others_turn:
                return []
            self._is_others_turn = False
            return running
        assert self._suspect is not None
        others = [request for request in running if request is not self._suspect]
        if not others:
            return [self._suspect]
        if not is_idle:
            return []
        self._is_others_turn = not self._is_others_turn
        return [self._suspect] if self._is_others_turn else others

    def admits(self, request: Request, is_alone: bool) -> bool:
        """Whether a waiting request may enter; is_alone: no other is in its step or in one in flight."""
        return not self.is_closed and (is_alone or not is_suspect(request))

    def enter(self, request: Request) -> None:
        """A request was admitted."""
        if is_suspect(request):
            self._suspect, self._is_others_turn = request, True
