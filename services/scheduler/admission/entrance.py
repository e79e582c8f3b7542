"""Who is let in: admission, applied to the requests of clients, as statuses and metrics."""

import time
from typing import Protocol

import grpc

from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.admission.admission import NOTHING_KNOWN, Admission, Forecast, WaitTooLong, load_of
from pagewire.services.scheduler.admission.token_budgets import TokenBudgets
from pagewire.services.scheduler.core.scheduler import QueueFull, Scheduler
from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.request import Request, too_long
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire.rpc import RpcError


class LiveRequest(Protocol):
    """What is known of a request that a client waits for. Times are by time.monotonic()."""

    @property
    def request(self) -> Request: ...

    @property
    def arrival_time(self) -> float: ...

    @property
    def first_step_time(self) -> float | None: ...

    @property
    def stage(self) -> str:
        """ "waiting", "prompt" or "output"."""


class Entrance:
    """Refuses requests that would wait too long, and learns from those that were served."""

    def __init__(self, scheduler: Scheduler, max_queue_time: float) -> None:
        self.admission = Admission()
        self._budgets = TokenBudgets()
        self._forecasts: dict[Request, Forecast] = {}  # of live requests
        self._scheduler = scheduler
        self._max_queue_time = max_queue_time

    def check(self, request: Request, timeout: float | None) -> Forecast:
        """timeout: seconds that the request has. What an earlier attempt has let in is not refused.

        Raises WaitTooLong.
        """
        self._budgets.check(request, time.monotonic())
        if request.is_resubmitted:
            return NOTHING_KNOWN
        forecast = self.admission.forecast(load_of(self._scheduler, request))
        self.admission.check(forecast, self._max_queue_time, timeout, time.monotonic())
        return forecast

    def check_length(self, submission: TokenSubmission, info: ExecutorInfo | None) -> None:
        """Before a prompt that is far too long costs this loop time; and none waits, in memory, for an executor that
        may never take it. info: of the present executors or of the last one. Raises RpcError."""
        message = submission.request
        num_tokens = len(message.prompt_token_ids)
        if info is None or num_tokens <= info.max_prompt_tokens(message.yields_vector):
            return
        if self._scheduler.info is not None:
            too_many = too_long(num_tokens, info, message.yields_vector)
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, too_many, [("prompt_token_ids", too_many)])
        if not submission.resubmitted:
            raise RpcError(
                grpc.StatusCode.UNAVAILABLE,
                "no executor is available now, and the last one took prompts of up to "
                f"{info.max_prompt_tokens(message.yields_vector)} tokens; this one has {num_tokens}. Try again later",
            )

    def status_of(self, error: Exception, forecast: Forecast = NOTHING_KNOWN) -> RpcError:
        """Of a request that was not taken."""
        if isinstance(error, RpcError):
            return error
        if isinstance(error, InvalidRequest):
            return RpcError(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.violations)
        retry_delay: float | None = None
        if isinstance(error, WaitTooLong):
            stats.REFUSALS.labels(error.reason).inc()
            retry_delay = error.retry_delay
        elif isinstance(error, QueueFull):
            stats.REFUSALS.labels("queue_full").inc()
            if forecast.interval:  # whoever is next in line makes a place
                retry_delay = self.admission.retry_delay(forecast, forecast.wait, time.monotonic())
        return RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry_delay=retry_delay)

    def on_taken(self, live: LiveRequest, forecast: Forecast) -> None:
        self._forecasts[live.request] = forecast
        self._budgets.add(live.request)

    def forecast_of(self, live: LiveRequest) -> Forecast:
        return self._forecasts.get(live.request, NOTHING_KNOWN)

    def on_failure(self) -> None:
        """Drops the forecasts of live requests: an executor was lost, so nothing can be learned from their waits."""
        self._forecasts.clear()

    def on_first_step(self, live: LiveRequest, now: float) -> None:
        request, waited = live.request, now - live.arrival_time
        self.admission.on_first_step(
            request.num_prompt_tokens, request.num_cached_tokens or 0, self.forecast_of(live), waited
        )

    def on_first_token(self, live: LiveRequest, now: float) -> None:
        forecast = self.forecast_of(live)
        if forecast.prefill:
            expected = forecast.wait + forecast.prefill
            stats.FORECAST_ERROR.observe(now - live.arrival_time - expected)

    def on_end(self, live: LiveRequest) -> None:
        self._budgets.remove(live.request)
        self._forecasts.pop(live.request, None)
        if live.first_step_time is not None:
            self.admission.on_end()


def expired(live: LiveRequest) -> RpcError:
    """What a client is told whose time is up."""
    stats.EXPIRED.labels(live.stage).inc()
    what = {
        "waiting": "it waited for its turn",
        "prompt": "its prompt was computed",
        "output": f"its output was generated: {live.request.num_output_tokens} tokens so far",
    }[live.stage]
    message = f"the request's time was up while {what}; allow it more, or come back when there is less to do"
    return RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, message)


def crashed_executors(num_losses: int, reason: str) -> RpcError:
    """Returns the error of a request that is the reason why executors fail."""
    message = (
        f"this request makes the executor fail: it was lost {num_losses} times while it ran this request, the last "
        f"time with nothing beside it ({reason}); the executor's log tells more"
    )
    return RpcError(grpc.StatusCode.INTERNAL, message)
