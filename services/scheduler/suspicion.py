"""Requests that may be the reason why executors die.

A death says nothing about its cause, so every request that was in flight is charged with it, until its next token
clears it. A request charged twice in a row runs in steps of its own, so that a third death charges only its cause,
which then ends. A request that brings down every executor thus costs the others a pause, never their answers.
"""

from collections.abc import Iterable

from pagewire.services.scheduler.request import Request, RequestStatus
from pagewire.services.scheduler.step import ScheduledStep

# Executors lost in a row, without a token in between, while they ran the request.
MAX_LOSSES = 3
_NUM_LOSSES_OF_SUSPECTS = MAX_LOSSES - 1


def charge(requests: Iterable[Request], in_flight: Iterable[ScheduledStep]) -> list[Request]:
    """Charges those of the requests that were in flight with the loss of the executor; returns those at the limit."""
    in_flight_ids = {request_id for step in in_flight for request_id in step.request_ids}
    condemned = []
    for request in requests:
        if request.request_id in in_flight_ids:
            request.num_losses += 1
            if request.num_losses >= MAX_LOSSES:
                condemned.append(request)
    return condemned


def is_suspect(request: Request) -> bool:
    return request.num_losses >= _NUM_LOSSES_OF_SUSPECTS


class Quarantine:
    """Keeps a suspect out of the steps of others: at most one runs on a replica, alone until a token clears it."""

    def __init__(self) -> None:
        self._suspect: Request | None = None

    @property
    def is_closed(self) -> bool:
        """Whether a suspect runs: nobody else may."""
        suspect = self._suspect
        if suspect is not None and not (suspect.status is RequestStatus.RUNNING and is_suspect(suspect)):
            self._suspect = None
        return self._suspect is not None

    def runners(self, running: list[Request], is_suspect_due: bool) -> list[Request]:
        """Those of the running requests that may run in the next step.

        is_suspect_due: one waits first in line, and there is room for it. The others pause until it has entered.
        """
        if self.is_closed:
            assert self._suspect is not None
            return [self._suspect]
        return [] if is_suspect_due else running

    def admits(self, request: Request, is_alone: bool) -> bool:
        """Whether a waiting request may enter; is_alone: no other is in its step or in one in flight."""
        return not self.is_closed and (is_alone or not is_suspect(request))

    def enter(self, request: Request) -> None:
        """A request was admitted."""
        if is_suspect(request):
            self._suspect = request
