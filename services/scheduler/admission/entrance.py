"""Admission, applied to the requests of clients: refusals are statuses, and metrics count them."""

import time
from weakref import WeakKeyDictionary

import grpc

from pagewire.services.scheduler.admission.admission import NOTHING_KNOWN, Admission, Forecast, WaitTooLong, load_of
from pagewire.services.scheduler.admission.token_budgets import TokenBudgets
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.service.live_request import LiveRequest
from pagewire.services.scheduler.values.request import Request
from pagewire.wire.rpc import RpcError


class Entrance:
    """Refuses requests that would wait too long, and learns from served ones."""

    def __init__(self, scheduler: Scheduler, max_queue_time: float) -> None:
        self.admission = Admission(scheduler.output_lengths)
        self._budgets = TokenBudgets()
        self._forecasts = WeakKeyDictionary[Request, Forecast]()
        self._scheduler = scheduler
        self._max_queue_time = max_queue_time

    def check(self, request: Request, timeout: float | None) -> None:
        """Raises RpcError RESOURCE_EXHAUSTED if the request would wait too long. A resubmitted request that was
        admitted before is not refused."""
        try:
            self._budgets.check(request, time.monotonic())
            if request.is_resubmitted:
                return
            forecast = self._forecasts[request] = self.admission.forecast(load_of(self._scheduler, request))
            self.admission.check(forecast, self._max_queue_time, timeout, time.monotonic())
        except WaitTooLong as error:
            stats.REFUSALS.labels(error.reason).inc()
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), retry_delay=error.retry_delay) from error

    def retry_delay(self, request: Request) -> float | None:
        forecast = self.forecast_of(request)
        if not forecast.interval:
            return None
        return self.admission.retry_delay(forecast, forecast.wait, time.monotonic())  # the next in line makes a place

    def forecast_of(self, request: Request) -> Forecast:
        return self._forecasts.get(request, NOTHING_KNOWN)

    def on_taken(self, live: LiveRequest) -> None:
        self._budgets.add(live.request)

    def on_executor_lost(self) -> None:
        """Drops the forecasts of live requests: an executor was lost, so nothing can be learned from their waits."""
        self._forecasts.clear()

    def on_first_step(self, live: LiveRequest, now: float) -> None:
        request, waited = live.request, now - live.arrival_time
        self.admission.on_first_step(
            request.num_prompt_tokens, request.num_cached_tokens or 0, self.forecast_of(live.request), waited
        )

    def on_first_token(self, live: LiveRequest, now: float) -> None:
        forecast = self.forecast_of(live.request)
        if forecast.prefill:
            expected = forecast.wait + forecast.prefill
            stats.FORECAST_ERROR.observe(now - live.arrival_time - expected)

    def on_end(self, live: LiveRequest) -> None:
        self._budgets.remove(live.request)
        self._forecasts.pop(live.request, None)
