"""The forecast of a request's wait for its first token. One that would wait too long is refused at once, with a time to
retry.

The forecast simulates an executor that serves the requests ahead in a few pieces. A piece takes the steps that its
prompts fill next to the decodes (`prefill_budget.py`), or the steps until there are places (rows and KV blocks) for it,
whichever are more. Running requests free places as they end: each of their tokens is the last one with the same
probability. A request with a place decodes from then on, and steps take longer.

The durations of steps (`cost_model.py`), the lengths of outputs and the cached share of prompts are learned from past
requests; until they are known, no request is refused. The forecast leaves out that short prompts overtake long ones,
and that some tokens are computed twice when blocks run out. Waits are then longer than forecast, and the next forecasts
are multiplied by the ratio. Several executors share the waiting requests evenly. Pure: times are arguments."""

import math
from dataclasses import dataclass

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.costs.output_lengths import OutputLengths
from pagewire.services.scheduler.values.request import Request

# The largest correction: beyond this factor, a forecast is wrong for reasons that a correction does not cover.
_MAX_FACTOR = 3.0
# The share of a learned sum that remains after the next request.
_MEMORY = 0.98
# Requests that are refused together get staggered retry times, over at most this many seconds: clients that are asked
# to wait for more than a minute give up, or retry when they like.
_MAX_STAGGER = 60.0
# The number of pieces into which the requests ahead of a new one are divided.
_PIECES = 8
# A client that retries at the given time should not be refused again because a forecast was a little short.
_SURE = 0.6
# The number of executors on which a forecast is based: those with the fewest requests, where the request will run.
_MOST_REPLICAS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a new request finds, for each executor."""

    replica: Replica  # that of the executor with the most measured steps
    num_executors: int
    num_decodes: float  # running requests with computed prompts
    num_prefills: float  # running requests with prompts still being computed
    num_prefill_tokens: float  # the uncomputed prompt tokens of these
    num_output_tokens: float  # the output tokens of running requests so far
    max_output_tokens: float  # the most output tokens that running requests may have
    num_open_rows: float
    free_kv_tokens: float  # tokens that fit into free blocks
    num_before: float  # waiting requests with an earlier turn
    num_tokens_before: float  # the tokens of these
    num_short_prompts: float  # of running requests, and of waiting ones with a row
    num_tokens: int  # the request's own, wherever it will run
    is_long: bool  # its prompt is long, so that others may overtake it

    @property
    def num_running(self) -> float:
        return self.num_decodes + self.num_prefills


def load_of(scheduler: Scheduler, request: Request) -> Load | None:
    """Returns the load that a request finds before it joins the queue; None without an executor. The time does not
    depend on the number of executors."""
    replicas = scheduler.placement.least_loaded(_MOST_REPLICAS)
    if not replicas:
        return None
    num, num_executors = len(replicas), scheduler.placement.num_present
    num_running = num_prefills = num_short_prefills = num_prefill_tokens = num_output_tokens = max_output_tokens = 0
    for replica in replicas:
        num_running += replica.num_running
        for one in replica.running:
            if (missing := one.num_tokens - one.num_computed_tokens) > 1:
                num_prefills += 1
                num_short_prefills += not one.is_long
                num_prefill_tokens += missing
            num_output_tokens += one.num_output_tokens
            max_output_tokens += one.max_num_tokens - one.num_prompt_tokens
    num_open_rows = sum(replica.num_open_rows for replica in replicas)
    num_before, num_tokens_before = scheduler.waiting_before(request)
    return Load(
        replica=scheduler.placement.best_known or replicas[0],
        num_executors=num_executors,
        num_decodes=(num_running - num_prefills) / num,
        num_prefills=num_prefills / num,
        num_prefill_tokens=num_prefill_tokens / num,
        num_output_tokens=num_output_tokens / num,
        max_output_tokens=max_output_tokens / num,
        num_open_rows=num_open_rows / num,
        free_kv_tokens=sum(map(_free_kv_tokens, replicas)) / num,
        num_before=num_before / num_executors,
        num_tokens_before=num_tokens_before / num_executors,
        num_short_prompts=num_short_prefills / num
        + min(scheduler.num_short_waiting / num_executors, num_open_rows / num),
        num_tokens=request.num_tokens,
        is_long=request.is_long,
    )


def _free_kv_tokens(replica: Replica) -> float:
    """Returns the free tokens of all requests together; infinite if no group of layers keeps all tokens, as rows are
    the bound then."""
    assert replica.info is not None
    sizes = [group.num_blocks * replica.info.block_size for group in replica.info.kv_groups if group.keeps_all]
    return (1 - replica.kv.usage) * min(sizes) if sizes else math.inf


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from the arrival of a request."""

    wait: float  # while other requests are served
    prefill: float  # from the end of the wait to the first token
    interval: float  # the additional wait of the next request like it
    plain_wait: float = 0.0  # before the correction by earlier requests
    is_long: bool = False


NOTHING_KNOWN = Forecast(0.0, 0.0, 0.0)


class _Correction:
    """The ratio of actual to forecast waits, as the ratio of their sums, in which later requests count more."""

    def __init__(self) -> None:
        self._forecast = self._waited = 1.0  # seconds

    def learn(self, plain_wait: float, waited: float) -> None:
        self._forecast = self._forecast * _MEMORY + plain_wait
        self._waited = self._waited * _MEMORY + waited

    @property
    def factor(self) -> float:
        return min(max(self._waited / self._forecast, 1 / _MAX_FACTOR), _MAX_FACTOR)


class WaitTooLong(Exception):
    """A request would wait too long for its first token."""

    def __init__(self, message: str, reason: str, retry_delay: float) -> None:
        """reason: "queue_time", "deadline" or "tokens_per_minute". retry_delay: seconds after which the request would
        not be refused."""
        super().__init__(message)
        self.reason = reason
        self.retry_delay = retry_delay


class _Course:
    """The course of an executor from now on: seconds that have passed, decoding requests, and open places."""

    def __init__(self, load: Load, request_tokens: float, output_tokens: float) -> None:
        """request_tokens: the tokens to compute of an average prompt. output_tokens: the expected output of a
        request."""
        self._replica = load.replica
        self._request_tokens = request_tokens
        self._output_tokens = output_tokens
        self._token_seconds = load.replica.costs.prompt_seconds(0, request_tokens) / request_tokens
        self._num_short_prompts = load.num_short_prompts
        self.seconds = 0.0
        self.num_decodes = load.num_decodes
        self._num_open = min(load.num_open_rows, load.free_kv_tokens / request_tokens)

    def go_on(self, num_requests: float, num_tokens: float, num_places: float) -> None:
        """Advances until there are `num_places` and `num_tokens` prompt tokens are computed; `num_requests` more decode
        then."""
        num_steps = num_tokens / self.room()
        if num_places > self._num_open:
            num_steps = max(num_steps, (num_places - self._num_open) * self._output_tokens / max(1.0, self._cohort))
        num_ended = num_steps * self._cohort / self._output_tokens
        self.seconds += num_steps * self._step_seconds + num_tokens * self._token_seconds
        self._num_open += num_ended - num_places
        self.num_decodes += num_requests - num_ended

    def prefill_seconds(self, num_tokens: float) -> float:
        """Returns the seconds of prefill of a request that begins now, including the rest of the running step and the
        way of the last step through all stages."""
        num_stages = self._replica.costs.num_stages
        num_steps = max(1.0, num_tokens / self.room()) + min(1.0, self.num_decodes) + num_stages - 1
        return num_steps * self._step_seconds + num_tokens * self._token_seconds

    def room(self) -> float:
        """Returns the prompt tokens of a step."""
        return self._replica.prompt_room(self._cohort, self._num_short_prompts, self._request_tokens)

    @property
    def _step_seconds(self) -> float:
        """The seconds of a step without the time of its prompt tokens."""
        costs = self._replica.costs
        return costs.decode_seconds(self._cohort) + costs.first_prompt_seconds

    @property
    def _cohort(self) -> float:
        """Returns how many of the decoding requests have a token in a step."""
        return self.num_decodes / self._replica.costs.num_stages


class Admission:
    """Learns how fast requests are served, and forecasts from that how long a new one waits."""

    def __init__(self, output_lengths: OutputLengths) -> None:
        self._output_lengths = output_lengths
        # Sums over requests, in which earlier ones count less.
        self._num_prompt_tokens = self._num_uncached_tokens = 1.0
        self._promised_until = 0.0
        self._corrections = _Correction(), _Correction()  # of short prompts, of long ones

    # -- learning ----------------------------------------------------------------------------------------------------

    def on_first_step(self, num_prompt_tokens: int, num_cached_tokens: int, forecast: Forecast, waited: float) -> None:
        """Learns from a request that got a row. waited: seconds since its arrival."""
        if forecast.plain_wait:
            self._corrections[forecast.is_long].learn(forecast.plain_wait, waited)
        self._num_prompt_tokens = self._num_prompt_tokens * _MEMORY + num_prompt_tokens
        self._num_uncached_tokens = self._num_uncached_tokens * _MEMORY + num_prompt_tokens - num_cached_tokens

    # -- forecasts ---------------------------------------------------------------------------------------------------

    def forecast(self, load: Load | None) -> Forecast:
        if load is None or not load.replica.costs.are_known:
            return NOTHING_KNOWN
        uncached, num = self._num_uncached_tokens / self._num_prompt_tokens, load.num_executors
        own, before = uncached * load.num_tokens, uncached * load.num_tokens_before
        mean_tokens = max(1.0, (before + own / num) / (load.num_before + 1 / num))
        course = _Course(load, mean_tokens, self._output_tokens(load))
        course.go_on(load.num_prefills, load.num_prefill_tokens, 0)
        num_pieces = min(_PIECES, math.ceil(load.num_before))
        for _ in range(num_pieces):
            course.go_on(load.num_before / num_pieces, before / num_pieces, load.num_before / num_pieces)
        course.go_on(0, 0, 1 / num)
        wait, prefill = course.seconds, course.prefill_seconds(own)
        course.go_on(1 / num, own / num, 1 / num)
        factor = self._corrections[load.is_long].factor
        return Forecast(factor * wait, prefill, factor * (course.seconds - wait), wait, load.is_long)

    def check(self, forecast: Forecast, max_wait: float, timeout: float | None, now: float) -> None:
        """Refuses a request that would wait too long. max_wait: the limit for all requests in seconds; 0: no limit.
        timeout: the limit of this request.

        Raises WaitTooLong. A request that waits for no other is not refused, as a retry would not help.
        """
        if not forecast.wait:
            return
        limit, reason = max_wait or math.inf, "queue_time"
        if timeout is not None and (time_to_wait := max(0.0, timeout - forecast.prefill)) < limit:
            limit, reason = time_to_wait, "deadline"
        if forecast.wait <= limit:
            return
        bound = f"it has {timeout:.3g} s" if reason == "deadline" else f"--max-queue-time is {max_wait:g} s"
        delay = self.retry_delay(forecast, limit, now)
        message = f"too many requests: this one would wait about {forecast.wait:.3g} s for its turn, and {bound}"
        raise WaitTooLong(f"{message}; try again in {math.ceil(delay)} s", reason, delay)

    def retry_delay(self, forecast: Forecast, limit: float, now: float) -> float:
        """Returns the seconds after which a request that is refused, as it would wait for more than `limit` seconds,
        would be admitted if only earlier refused requests came back."""
        earliest = now + max(0.0, forecast.wait - _SURE * limit)
        slot = max(earliest, self._promised_until)
        if slot > earliest + _MAX_STAGGER:
            slot = earliest  # as not all come back, later requests reuse the earliest times
        self._promised_until = slot + forecast.interval / _SURE
        return self._promised_until - now

    def _output_tokens(self, load: Load) -> float:
        """Returns the expected output tokens of a request, within the limits of running requests. While lengths are
        unknown, it is twice the present output of running requests, which are halfway on average."""
        num_running = max(1.0, load.num_running)
        output = self._output_lengths.mean(otherwise=2.0 * load.num_output_tokens / num_running)
        return max(1.0, min(output, load.max_output_tokens / num_running) if load.num_running else output)
