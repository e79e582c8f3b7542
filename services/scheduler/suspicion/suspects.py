"""Finds requests that may crash executors, within two failures and with no more than a pause for other requests.

A failure does not reveal its cause, so all requests in flight become suspects until they have passed the tokens that
were in flight then. A suspect runs in separate steps, so if an executor is lost again, the suspect is the cause, and
ends. Halving the set of suspects instead would need one more failure for each halving, and every failure loses all KV.

If an executor vanishes without a message, the reason may be a step or a `kill -9`. The second time is then less
certain: a suspect gets a third try, unless the successor reports that the process failed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from pagewire.services.scheduler.core.seams import LostExecutor
from pagewire.services.scheduler.suspicion.quarantine import SuspectQuarantine
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.request import Request, RequestStatus
from pagewire.v1.common_pb2 import SamplingParams

# The failures that a request can cause: one with others, one alone.
MAX_LOSSES = 2
# The same, if no failure has a known reason.
MAX_SILENT_LOSSES = 3
# The most tokens in flight of a request that was preempted meanwhile.
_TOKENS_IN_FLIGHT = 2


@dataclass(slots=True)
class Suspicion:
    """The suspicion of one request, which runs alone."""

    until: int  # the number of tokens with which it is cleared
    num_losses: int = 1  # executors lost when it became, or while it was, a suspect


class Suspects:
    """The suspects among the live requests."""

    def __init__(self) -> None:
        self._suspicions = WeakKeyDictionary[Request, Suspicion]()
        # Replica id -> incarnation of its last executor, and the suspects that ran alone when it vanished.
        self._unexplained: dict[int, tuple[int, list[Request]]] = {}

    def quarantine(self) -> SuspectQuarantine:
        return SuspectQuarantine(self.is_suspect)

    def is_suspect(self, request: Request) -> bool:
        suspicion = self._suspicions.get(request)
        return suspicion is not None and len(request.token_ids) < suspicion.until

    def num_losses(self, request: Request) -> int:
        suspicion = self._suspicions.get(request)
        return 0 if suspicion is None else suspicion.num_losses

    def on_lost(self, lost: LostExecutor, requests: Sequence[Request]) -> Mapping[Request, int]:
        if lost.was_leaving and not lost.loss.is_of_step:
            return {}
        ended = self._blame(lost, requests)
        self._unexplained.pop(lost.replica_id, None)
        if lost.incarnation is not None:
            in_flight_ids = _in_flight_ids(lost)
            unexplained = [one for one in requests if self._is_unexplained(one) and one.request_id in in_flight_ids]
            self._unexplained[lost.replica_id] = lost.incarnation, unexplained
        return ended

    def on_successor(self, replica_id: int, info: ExecutorInfo, requests: Sequence[Request]) -> Mapping[Request, int]:
        incarnation, unexplained = self._unexplained.pop(replica_id, (info.incarnation, []))
        if not info.predecessor_failed or info.incarnation == incarnation:
            return {}
        found = [one for one in unexplained if self._is_unexplained(one) and not one.is_finished]
        return self._with_alike(found, requests)

    def _blame(self, lost: LostExecutor, requests: Sequence[Request]) -> Mapping[Request, int]:
        """Makes the live requests in flight suspects. Returns the request that crashed an executor alone, if there is
        one, with all suspects that ask for exactly the same."""
        if not lost.loss.may_be_caused_by_request:
            return {}
        in_flight_ids = _in_flight_ids(lost)
        in_flight = [request for request in requests if request.request_id in in_flight_ids]
        if len(in_flight_ids) == len(in_flight) == 1 and self.is_suspect(in_flight[0]):
            suspicion = self._suspicions[in_flight[0]]
            suspicion.num_losses += 1
            is_certain = lost.loss.is_of_step or suspicion.num_losses >= MAX_SILENT_LOSSES
            return self._with_alike(in_flight, requests) if is_certain else {}
        for request in in_flight:
            is_running = request.status is RequestStatus.RUNNING
            num_tokens = request.num_output_placeholders if is_running else _TOKENS_IN_FLIGHT
            self._suspicions[request] = Suspicion(request.num_tokens + max(1, num_tokens))
            request.blocks.await_none()
        return {}

    def _is_unexplained(self, request: Request) -> bool:
        """Returns whether an executor vanished while it ran this request alone, and the request has not been cleared
        since."""
        return self.is_suspect(request) and self.num_losses(request) >= MAX_LOSSES

    def _with_alike(self, found: Iterable[Request], requests: Sequence[Request]) -> Mapping[Request, int]:
        return {
            request: self.num_losses(request)
            for one in found
            for request in requests
            if request is one or self._is_alike(request, one)
        }

    def _is_alike(self, request: Request, other: Request) -> bool:
        """Returns whether a suspect is the same to the executor as another request: usually another output of one call
        (n > 1)."""
        if not self.is_suspect(request) or other.num_output_tokens or request.token_ids != other.token_ids:
            return False
        end = request.num_prompt_tokens
        if request.images.keys(0, end) != other.images.keys(0, end) or request.yields_vector != other.yields_vector:
            return False
        return _without_seed(request) == _without_seed(other)


def _in_flight_ids(lost: LostExecutor) -> set[int]:
    return {request_id for step in lost.in_flight for request_id in step.request_ids}


def _without_seed(request: Request) -> SamplingParams:
    params = SamplingParams()
    params.CopyFrom(request.sampling_params)
    params.ClearField("seed")
    return params
