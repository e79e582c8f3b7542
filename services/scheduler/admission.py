"""Whether a request would have to wait too long for its first token: then it is told so at once, and when to come back.

A wait ends when all prompts before it are computed and there is a place: a row, and KV blocks. Prompts take as many
steps as their tokens fill; places become free as running requests end, each step by chance: one in so many of its
tokens is the last one of a request. Both happen in the same steps, so

    steps = max(tokens before / tokens per step, places missing * tokens per output / requests that run)
    wait  = steps * seconds per step + tokens before * seconds per token

All rates are learned from what was done, and while they are not known nobody is refused. Several executors share what
waits evenly. Pure: times are given.
"""

import math
from dataclasses import dataclass

from pagewire.services.scheduler.replica import Replica
from pagewire.services.scheduler.request import Request
from pagewire.services.scheduler.scheduler import Scheduler
from pagewire.services.scheduler.step_costs import StepCosts

# Of what is learned per request, the part that the next one leaves.
_MEMORY = 0.98
# Outputs that have to have ended before their lengths are believed.
_MIN_OUTPUTS = 8
# Those who are refused together are told to come back one by one, over at most so many seconds: clients give up, or
# come back when they like, if they are told to wait for more than a minute.
_MAX_STAGGER = 60.0
# Who comes back when told to should not be refused again because a forecast was a little short.
_SURE = 0.6


@dataclass(frozen=True, slots=True)
class Load:
    """What a newcomer finds, over all executors."""

    num_executors: int
    step_tokens: int  # that a step of all executors may compute
    num_running: int
    num_open_rows: int
    free_kv_tokens: float  # that blocks are free for
    num_prefill_tokens: int  # of those that run, still to be computed
    num_output_tokens: int  # of those that run, so far
    max_output_tokens: int  # of those that run, at most
    num_before: int  # those that wait and have their turn before it
    num_tokens_before: int  # of these
    num_tokens: int  # its own


def load_of(scheduler: Scheduler, request: Request) -> Load:
    """As the request, which is not among those that wait, finds it."""
    replicas = [replica for replica in scheduler.replicas if replica.info]
    running = [one for replica in replicas for one in replica.running]
    before = scheduler.waiting_before(request)
    return Load(
        num_executors=len(replicas),
        step_tokens=sum(replica.max_num_batched_tokens for replica in replicas),
        num_running=len(running),
        num_open_rows=sum(replica.num_open_rows for replica in replicas),
        free_kv_tokens=sum(map(_free_kv_tokens, replicas)),
        num_prefill_tokens=sum(max(0, one.num_tokens - one.num_computed_tokens - 1) for one in running),
        num_output_tokens=sum(one.num_output_tokens for one in running),
        max_output_tokens=sum(one.max_num_tokens - one.num_prompt_tokens for one in running),
        num_before=len(before),
        num_tokens_before=sum(one.num_tokens for one in before),
        num_tokens=request.num_tokens,
    )


def _free_kv_tokens(replica: Replica) -> float:
    """All requests together. Where no group of layers keeps all tokens, rows are the bound."""
    assert replica.info is not None
    sizes = [group.num_blocks * replica.info.block_size for group in replica.info.kv_groups if group.keeps_all]
    return (1 - replica.kv_usage) * min(sizes) if sizes else math.inf


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from the arrival of a request."""

    wait: float  # for others
    prefill: float  # from then to its first token
    interval: float  # by which the next one like it would wait longer


NOTHING_KNOWN = Forecast(0.0, 0.0, 0.0)


class WaitTooLong(Exception):
    """A request would wait too long for its first token."""

    def __init__(self, message: str, reason: str, retry_delay: float) -> None:
        """reason: "queue_time", "deadline" or "tokens_per_minute". retry_delay: seconds after which it would not."""
        super().__init__(message)
        self.reason = reason
        self.retry_delay = retry_delay


class Admission:
    """Learns how fast requests are served, and from that tells how long a newcomer waits."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        # Sums over requests that count less with every later one.
        self._num_prompt_tokens = self._num_uncached_tokens = 1.0
        self._num_ends = 0.0
        self._num_gained_tokens = 0.0
        self._promised_until = 0.0

    # -- what was done -----------------------------------------------------------------------------------------------

    def on_first_step(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request has a row."""
        self._num_prompt_tokens = self._num_prompt_tokens * _MEMORY + num_prompt_tokens
        self._num_uncached_tokens = self._num_uncached_tokens * _MEMORY + num_prompt_tokens - num_cached_tokens

    def on_tokens(self, num_tokens: int) -> None:
        """Running requests have gained so many."""
        self._num_gained_tokens += num_tokens

    def on_end(self) -> None:
        """A request has given its row back, for whatever reason."""
        self._num_ends = self._num_ends * _MEMORY + 1
        self._num_gained_tokens *= _MEMORY

    # -- what is to come ---------------------------------------------------------------------------------------------

    def forecast(self, load: Load) -> Forecast:
        if not self.costs.are_known or not load.num_executors:
            return NOTHING_KNOWN
        uncached = self._num_uncached_tokens / self._num_prompt_tokens
        before, own = load.num_prefill_tokens + uncached * load.num_tokens_before, uncached * load.num_tokens
        output = self._output_tokens(load)
        wait = self._wait(load, before, load.num_before + 1, output)
        next_wait = self._wait(load, before + own, load.num_before + 2, output)
        step = self.costs.step_seconds(load.num_running / load.num_executors)
        # A prompt runs on one executor. As its first step can begin, so does the one that runs have to end.
        num_steps = max(1.0, own * load.num_executors / self._room(load)) + min(1, load.num_running)
        prefill = num_steps * step + own * self.costs.token_seconds
        return Forecast(wait, prefill, next_wait - wait)

    def check(self, forecast: Forecast, max_wait: float, timeout: float | None, now: float) -> None:
        """max_wait: seconds that any request may wait, 0: for as long as it takes. timeout: seconds that this one has.

        Raises WaitTooLong. Who waits for nobody is not refused: it would fare no better later.
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
        """Seconds after which a request that is refused, as it would wait for more than `limit` seconds, would not be,
        if nobody came but those who were refused before it."""
        earliest = now + max(0.0, forecast.wait - _SURE * limit)
        slot = max(earliest, self._promised_until)
        if slot > earliest + _MAX_STAGGER:
            slot = earliest  # not all come back: the next ones share the time with those before them
        self._promised_until = slot + forecast.interval / _SURE
        return self._promised_until - now

    def _wait(self, load: Load, num_tokens: float, num_places: int, output_tokens: float) -> float:
        """Until so many tokens of prompts are computed and so many places are free or have become so."""
        num_steps = num_tokens / self._room(load)
        uncached = self._num_uncached_tokens / self._num_prompt_tokens
        mean_tokens = max(1.0, uncached * (load.num_tokens_before + load.num_tokens) / (load.num_before + 1))
        num_fitting = min(load.num_open_rows, load.free_kv_tokens / mean_tokens)
        if (num_missing := num_places - num_fitting) > 0:
            num_steps = max(num_steps, num_missing * output_tokens / max(1.0, load.num_running + num_fitting))
        step = self.costs.step_seconds(load.num_running / load.num_executors)
        return num_steps * step + num_tokens * self.costs.token_seconds / load.num_executors

    def _room(self, load: Load) -> float:
        """Tokens of prompts in a step of all executors."""
        return max(1.0, load.step_tokens - load.num_running)

    def _output_tokens(self, load: Load) -> float:
        """Of a request: the maximum-likelihood estimate where each token may be the last, by tokens of all requests,
        those that still run too, and ends. At first, twice what those that run have, as they are half way on average.
        """
        if self._num_ends >= _MIN_OUTPUTS:
            output = self._num_gained_tokens / self._num_ends
        else:
            output = 2.0 * load.num_output_tokens / max(1, load.num_running)
        return min(output, load.max_output_tokens / load.num_running) if load.num_running else output
