"""The inputs of one call at the scheduler, as many at once as it accepts."""

import asyncio
from collections import deque
from collections.abc import Sequence

import grpc

from pagewire.services.tokenizer.scheduler_link import SchedulerLink, SubmittedRequest
from pagewire.v1 import common_pb2
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire.rpc import RpcError

# The most requests of one call at the scheduler. More would not keep executors busier, and the scheduler takes 70
# microseconds for each, during which it decides no steps.
MAX_IN_FLIGHT = 1024

Outcome = common_pb2.Vector | RpcError


class _Listener:
    """A TokenListener that puts the outcome of one input into the common queue."""

    def __init__(self, index: int, outcomes: asyncio.Queue[tuple[int, Outcome]]) -> None:
        self._index = index
        self._outcomes = outcomes

    def on_tokens(
        self,
        token_ids: Sequence[int],
        finish_reason: common_pb2.FinishReason,
        cached_tokens: int,
        stop_token_id: int | None,
        logprobs: common_pb2.Logprobs | None,
    ) -> None:
        if finish_reason:  # aborted by its external id
            self.on_error(RpcError(grpc.StatusCode.CANCELLED, "the request was aborted"))

    def on_weights(self, version: str) -> None:
        """Ignores the version, which vectors do not report."""

    def on_prompt_logprobs(self, logprobs: common_pb2.Logprobs) -> None:
        raise ValueError("the scheduler returned log probabilities for a request for a vector")

    def on_vector(self, vector: common_pb2.Vector) -> None:
        self._outcomes.put_nowait((self._index, vector))

    def on_error(self, error: RpcError) -> None:
        self._outcomes.put_nowait((self._index, error))


class VectorBatch:
    """Requests for vectors that end together, all computed by the same weights.

    If --max-waiting-requests leaves room for only some of them, the others wait here: a batch is refused as a whole or
    not at all.
    """

    def __init__(self, link: SchedulerLink, messages: Sequence[TokenSubmission], *, is_admitted: bool = False) -> None:
        """is_admitted: earlier parts of the call were answered, so this one is not refused."""
        self._link = link
        self._messages = messages
        self._is_admitted = is_admitted
        self._running: dict[int, SubmittedRequest] = {}  # by index
        self._outcomes: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()

    async def run(self) -> list[common_pb2.Vector]:
        """Returns the vectors in order. If one fails, or the caller is cancelled, all end. Raises RpcError."""
        vectors: dict[int, common_pb2.Vector] = {}
        waiting = deque(range(len(self._messages)))
        window = MAX_IN_FLIGHT
        latest = ""  # the version of the weights of the latest vector
        try:
            while waiting or self._running:
                while waiting and len(self._running) < window:
                    self._submit(waiting.popleft())
                index, outcome = await self._outcomes.get()
                del self._running[index]
                if isinstance(outcome, common_pb2.Vector):
                    vectors[index] = outcome
                    self._is_admitted = True
                    window = min(window + 1, MAX_IN_FLIGHT)
                    latest = self._messages[index].weights_version
                    if not waiting and not self._running:
                        # The weights were replaced meanwhile: vectors of different weights are not comparable.
                        waiting.extend(i for i in vectors if self._messages[i].weights_version != latest)
                elif self._may_wait(index, outcome):
                    waiting.appendleft(index)
                    window = max(1, len(self._running))
                else:
                    raise outcome
        finally:
            for request in self._running.values():
                self._link.abort(request)
        return [vectors[index] for index in range(len(self._messages))]

    def _submit(self, index: int) -> None:
        message = self._messages[index]
        if self._is_admitted and not self._running:
            message.resubmitted = True  # otherwise none of this batch might ever be admitted
        request = SubmittedRequest(message, _Listener(index, self._outcomes))
        self._running[index] = request
        self._link.submit(request)

    def _may_wait(self, index: int, error: RpcError) -> bool:
        """Whether another request of the batch was or may be admitted, and this one was refused for lack of room."""
        is_full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not self._messages[index].resubmitted
        return is_full and (self._is_admitted or bool(self._running))
