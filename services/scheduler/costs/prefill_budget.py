"""The part of a step that prompts may take, so that decoding requests get their next token in time.

A step with decodes should not take longer than --target-itl-ms. The cost model (`cost_model.py`) predicts its
duration without prompts; prompts get the rest of the time. Prompts always get some time: a third of the time of the
decodes or, without a set target, the larger of the decodes' time and half the default target. A step without decodes
may take longer, as it delays only requests that arrive meanwhile; a single request has a longer limit. Without a set
target, a step may also take longer when more short prompts wait than requests decode: in a burst, short steps delay
more requests than they help. In a pipeline of S stages, decoding requests wait for S steps, each of which may take an
S-th of that time."""

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.costs.cost_model import StepCosts

# Smaller pieces are not worth their overhead.
MIN_CHUNK = 16
_DEFAULT_TARGET = 0.05  # seconds
_ALONE = 0.2  # seconds for a single request: what arrives waits for the steps in flight, two of these
_LEAST_SHARE = 1 / 3  # of the time of the decodes
_MAX_STRETCH = 4.0  # times the target, when more requests wait for a first token than for a next one
# The share of the decodes' time, if these belong to tenants that were served less, which keep more than half their
# rate.
_ALLOWED_SHARE = 2 / 3
NO_LIMIT = float("inf")


class PrefillTarget:
    """The seconds of a step that prompt tokens may take."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._target = None if config.target_itl_ms is None else config.target_itl_ms / 1000

    def seconds(
        self, costs: StepCosts, num_decodes: float, num_short_prompts: float, *, is_alone: bool, is_contended: bool
    ) -> float:
        """Returns the seconds. num_decodes: decodes of each step. num_short_prompts: short prompts that run, or wait
        and have a row. is_alone: there is only one request. is_contended: there are several tenants; a less served one
        may send a request at any time, so steps without decodes are kept short, too."""
        if self._target == 0:
            return NO_LIMIT
        if is_alone:
            return _ALONE / costs.num_stages
        decodes, stages = costs.decode_seconds(num_decodes), costs.num_stages
        if self._target is None:
            target, least = _DEFAULT_TARGET / stages, max(decodes, _DEFAULT_TARGET / stages / 2)
        else:
            target, least = self._target / stages, decodes * _LEAST_SHARE
        if not is_contended and (num_decodes < 1 or self._target is None):
            ratio = num_short_prompts / (num_decodes * stages) if num_decodes >= 1 else _MAX_STRETCH
            target *= min(max(1.0, ratio), _MAX_STRETCH)
        return max(target - decodes - costs.first_prompt_seconds, least)


class Allowance:
    """The time that prompts may take if their tenants were served more than others with running requests. Each step
    earns a part of it until it suffices for a whole step: a few tokens in every step would cost the others as much
    without progress."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def earn(self, costs: StepCosts, num_decodes: int, seconds: float) -> float:
        """Earns time in a step with `num_decodes` decodes, in which prompt tokens may take `seconds`.

        Returns the seconds for prompts of these tenants in this step: none or all.
        """
        decodes, first = costs.decode_seconds(num_decodes), costs.first_prompt_seconds
        if seconds == NO_LIMIT or not decodes:
            return NO_LIMIT
        self._seconds = min(self._seconds + _ALLOWED_SHARE * decodes, first + seconds)
        return seconds if self._seconds == first + seconds else 0.0

    def spend(self, seconds: float) -> None:
        self._seconds -= seconds


class PrefillBudget:
    """The rest of a step, which is left for prompts."""

    def __init__(self, costs: StepCosts, num_tokens: int, seconds: float) -> None:
        """num_tokens, seconds: the limits of all prompts in the step."""
        self._costs = costs
        if seconds != NO_LIMIT and costs.most_prompt_tokens:
            num_tokens = min(num_tokens, max(MIN_CHUNK, costs.most_prompt_tokens))
        self._all_tokens = self.num_tokens = num_tokens
        self._all_seconds = self._seconds = seconds

    def fit(self, start: int, wanted: int, *, kept: float = 0.0, least: int = 0) -> int:
        """Returns how many of `wanted` tokens of a prompt, from position `start` on, fit; none if the budget is
        overdrawn, as by a tenant that counts as served more only since its request was admitted.

        kept: the share of the whole budget that is left to others. least: the number of tokens that fit regardless of
        time.
        """
        tokens = min(wanted, int(self.num_tokens - kept * self._all_tokens))
        if self._all_seconds != NO_LIMIT and tokens > 0:
            within = self._costs.prompt_tokens_within(self._seconds - kept * self._all_seconds, start)
            if within < tokens:
                tokens = int(within) if within >= MIN_CHUNK else 0
        return max(tokens, min(least, wanted, self.num_tokens), 0)

    def spend(self, start: int, num_tokens: int) -> None:
        self.num_tokens -= num_tokens
        if self._all_seconds != NO_LIMIT:
            self._seconds -= self._costs.prompt_seconds(start, num_tokens)
