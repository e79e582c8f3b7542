"""Delivery of outputs to clients: new tokens, and the ends of requests. It also updates metrics and spans."""

import logging
import time
from collections.abc import Callable, Sequence

import grpc

from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.observed import stats, timeline
from pagewire.services.scheduler.observed.timeline import DECODE, HANDOVER
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.expiry import Expiry
from pagewire.services.scheduler.service.live_request import LiveRequest
from pagewire.services.scheduler.service.request_output import MAX_UNREAD_OF_STREAM, RequestOutput
from pagewire.services.scheduler.service.seams import Admission, HeldOutputs
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.telemetry.recent import Accounts
from pagewire.telemetry.trace import Trace
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)


class Delivery:
    """The live requests, by request id, and the delivery of their outputs to the clients."""

    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission,
        expiry: Expiry,
        statistics: stats.Stats,
        wake: Callable[[], None],
        make_held: Callable[[Callable[[], None]], HeldOutputs],
    ) -> None:
        """wake: called when there may be a step to decide."""
        self._scheduler = scheduler
        self._admission = admission
        self._expiry = expiry
        self._stats = statistics
        self._wake = wake
        self.held = make_held(self.deliver)
        self.live: dict[int, LiveRequest] = {}
        self.accounts = Accounts(self.live.values)

    def add(self, live: LiveRequest) -> None:
        self.live[live.request.request_id] = live

    def on_admitted(self, requests: Sequence[Request]) -> list[Trace]:
        """Takes in requests that enter an executor; returns their traces."""
        now = time.monotonic()
        traces = []
        for request in requests:
            live = self.live[request.request_id]
            if live.first_step_time is None:
                live.first_step_time = now
                stats.on_first_step(request, now - live.arrival_time, live.span.exemplar)
                self._admission.on_first_step(live, now)
            traces.append(live.span.trace)
        return traces

    # -- outputs -----------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Delivers the latest results, if they are pending. Call it before a request is ended, because the counts of
        the request already include these tokens."""
        if (outputs := self.held.take()) is None:
            return
        now = time.monotonic()
        end = 0
        for i, (request, num_tokens) in enumerate(zip(outputs.requests, outputs.num_tokens, strict=True)):
            start, end = end, end + num_tokens
            live = self.live.get(request.request_id)
            if live is None:
                continue  # aborted meanwhile
            output = RequestOutput.of(request, outputs.token_ids[start:end])
            if live.timeline.is_prefilling:
                self._on_prefilled(live, output, now)
            if outputs.logprobs and (logprobs := outputs.logprobs.get(i)) is not None:
                output.logprobs = [convert.first_logprobs(logprobs, num_tokens)]
            if outputs.prompt_logprobs:
                output.prompt_logprobs = outputs.prompt_logprobs.get(i)
            if outputs.vectors:
                output.vector = outputs.vectors.get(i)
            if output.is_last:
                self.close(live)
            num_unread = live.outbox.put(live.number, output)
            if num_unread and not output.is_last:
                self._check_unread(live, num_unread)
        for request, error in outputs.refused:
            if (live := self.live.get(request.request_id)) is not None:
                self.end(live, RpcError.from_message(error))

    def _on_prefilled(self, live: LiveRequest, output: RequestOutput, now: float) -> None:
        """Takes in the first output after an admission, including one after a preemption or a recovery."""
        if not output.is_last:
            name = HANDOVER if live.request.replica_id is None else DECODE
            live.timeline.enter(name, now, num_output_tokens=live.request.num_output_tokens - len(output.token_ids))
        if live.first_token_time is None and live.first_step_time is not None:
            live.first_token_time = now
            stats.PREFILL_TIME.observe(now - live.first_step_time, live.span.exemplar)
            live.span.event("first token", now)
            self._admission.on_first_token(live, now)
            output.weights_version = live.request.weights_version

    def _check_unread(self, live: LiveRequest, num_unread: int) -> None:
        """Ends a request if its client has too much unread output, of this request or of all its requests."""
        if live.max_unread is not None and num_unread > live.max_unread:
            unread = f"the output of this request: more than {live.max_unread} tokens and log probabilities wait"
        elif live.outbox.num_unread > MAX_UNREAD_OF_STREAM:
            unread = f"its stream: more than {MAX_UNREAD_OF_STREAM} tokens and log probabilities wait"
        else:
            return
        self._scheduler.abort(live.request, FinishReason.ERROR)
        self._wake()
        message = f"the client has not read {unread}; read faster"
        self.end(live, RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message))

    # -- ends --------------------------------------------------------------------------------------------------------

    def end(self, live: LiveRequest, error: RpcError | None = None) -> None:
        """Reports to a client the end of its request, which the scheduler has already dropped."""
        output = RequestOutput.of(live.request, [])
        output.error = error
        self.close(live, error)
        live.outbox.put(live.number, output)

    def close(self, live: LiveRequest, error: RpcError | None = None) -> None:
        """Closes a request after its end was reported to the client, or the client aborted it."""
        request = live.request
        del self.live[request.request_id]
        self._expiry.remove(request.request_id)
        assert request.finish_reason is not None
        self._stats.on_end(request)
        self._admission.on_end(live)
        logger.debug(
            "ended (%s) after %d prompt and %d output tokens, %d preemptions%s",
            request.finish_reason.name.lower(),
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.num_preemptions,
            f": {error.message}" if error else "",
            extra={"request_id": live.external_id or request.request_id, "trace_id": live.span.trace.trace_id},
        )
        now, exemplar = time.monotonic(), live.span.exemplar
        if live.first_step_time is not None:
            stats.INFERENCE_TIME.observe(now - live.first_step_time, exemplar)
        if live.first_token_time is not None:
            stats.DECODE_TIME.observe(now - live.first_token_time, exemplar)
        live.timeline.close(now, request.num_output_tokens)
        code = error.code.name if error else "CANCELLED" if request.finish_reason is FinishReason.ABORT else "OK"
        timeline.end_span(live.span, request, live.timeline, code, error.message if error else None)
        if live.external_id:
            self.accounts.add(request.tenant.name, live.account(has_ended=True))
