"""The part of a step that prompts may take, so that decoding requests have their next token in time.

A step with decodes in it should not take longer than --target-itl-ms. What it would take without prompts is known from
experience (`cost_model.py`), and prompts have the rest of the time. Prompts always get something: a third of what the
decodes take, by default as much as these, and half the target. A step without decodes may take longer, as it
delays only requests that arrive meanwhile, and a request that is alone takes what it likes. Unless a target was set, so
may one for which more short prompts wait than requests decode: in a burst, steps that are kept short delay more than
they hurry. In a pipeline of S stages, decoding requests wait for S steps, each of which may take an S-th of that."""

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.costs.cost_model import StepCosts

# Smaller pieces are not worth their overhead.
MIN_CHUNK = 16
_DEFAULT_TARGET = 0.05  # seconds
_LEAST_SHARE = 1 / 3  # of the time that decodes take
_MAX_STRETCH = 4.0  # times the target, where more wait for a first token than for a next one
# Of the time that decodes take, where they are of tenants that were served less: these keep more than half their rate.
_ALLOWED_SHARE = 2 / 3
NO_LIMIT = float("inf")


class PrefillTarget:
    """Says how many seconds of a step the tokens of prompts may take."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._target = None if config.target_itl_ms is None else config.target_itl_ms / 1000

    def seconds(
        self, costs: StepCosts, num_decodes: float, num_short_prompts: float, *, is_alone: bool, is_contended: bool
    ) -> float:
        """Returns the seconds. num_decodes: of each step. num_short_prompts: that run, or wait and have a row.
        is_alone: there is one request. is_contended: there are several tenants, one of which may be about to come that
        was served less, so that a step without decodes has to be short, too."""
        if self._target == 0 or is_alone:
            return NO_LIMIT
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
    """Time that prompts may take of tenants that were served more than others that run. It is saved up, a part of every
    step, until it is worth a whole one: a few tokens in every step would cost the others as much and get nowhere."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def earn(self, costs: StepCosts, num_decodes: int, seconds: float) -> float:
        """Earns in a step with `num_decodes`, in which tokens of prompts may take `seconds`.

        Returns how long theirs may take in it: nothing, or all of that.
        """
        decodes, first = costs.decode_seconds(num_decodes), costs.first_prompt_seconds
        if seconds == NO_LIMIT or not decodes:
            return NO_LIMIT
        self._seconds = min(self._seconds + _ALLOWED_SHARE * decodes, first + seconds)
        return seconds if self._seconds == first + seconds else 0.0

    def spend(self, seconds: float) -> None:
        self._seconds -= seconds


class PrefillBudget:
    """The rest of a step that is left for prompts."""

    def __init__(self, costs: StepCosts, num_tokens: int, seconds: float) -> None:
        """seconds: that their tokens may take. Where that is no more than a small piece, there is none."""
        self._costs = costs
        if seconds != NO_LIMIT and costs.most_prompt_tokens:
            num_tokens = min(num_tokens, max(MIN_CHUNK, costs.most_prompt_tokens))
        self._all_tokens = self.num_tokens = num_tokens
        self._all_seconds = self._seconds = seconds

    def fit(self, start: int, wanted: int, *, kept: float = 0.0, least: int = 0) -> int:
        """Returns how many of `wanted` tokens of a prompt, from position `start` on, fit; none if more was spent than
        there was, as by a tenant that is one of those served more since its request was admitted.

        kept: the part of the whole that is left to others. least: so many fit however long they take.
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
