"""The part of a step for prompts: for all of them, for the first one, and for those of tenants that were served more
than others with running requests."""

from pagewire.services.scheduler.core.rows import Rows
from pagewire.services.scheduler.core.seams import Shares
from pagewire.services.scheduler.costs.prefill_budget import MIN_CHUNK, NO_LIMIT, PrefillBudget, PrefillTarget
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep

# The share of the prompt budget that is kept for the first prompt in order: it may be overtaken, but never starves.
_KEPT = 1 / 4
# Matrix products compute tokens in tiles, and the sizes of recorded steps are multiples of these.
_TILE, _LARGE = 8, 64


class StepBudget:
    """Decides how many tokens of each prompt to compute, and counts them."""

    def __init__(
        self,
        step: ScheduledStep,
        rows: Rows,
        shares: Shares,
        target: PrefillTarget,
        *,
        num_short_prompts: int,
        is_alone: bool,
    ) -> None:
        """step: already contains its decodes. num_short_prompts: short prompts that run, or wait and have a row.
        is_alone: there is only one request."""
        self._step = step
        self._limits, self._costs, self._allowance = rows.limits, rows.costs, rows.allowance
        self._is_alone = is_alone
        self._is_contended = shares.is_contended
        self._least_served = shares.least_served_running() if self._is_contended else 0.0
        num_decodes = max(step.work.num_decodes, rows.cohorts.size)  # a step delays the other cohorts, too
        num_tokens = self._limits.max_num_batched_tokens - num_decodes
        seconds = target.seconds(
            self._costs, num_decodes, num_short_prompts, is_alone=is_alone, is_contended=self._is_contended
        )
        if not self._limits.splits_prompts:
            seconds = NO_LIMIT  # otherwise a prompt that takes longer would wait forever
        self._all = PrefillBudget(self._costs, num_tokens, seconds)
        self._over_served: PrefillBudget | None = None  # None: no separate bound
        if self._is_contended and num_decodes and self._limits.splits_prompts:
            allowed = self._allowance.earn(self._costs, num_decodes, seconds)
            self._over_served = PrefillBudget(self._costs, num_tokens if allowed else 0, allowed)

    @property
    def is_spent(self) -> bool:
        return self._all.num_tokens <= 0

    def kept_for(self, first: Request) -> float:
        """Returns the share that others leave to the first prompt. If the share is too small for a chunk, the first
        prompt has every fourth step to itself instead."""
        if self._is_over_served(first):
            return 0.0
        if self._all.fit(first.num_computed_tokens, self._all.num_tokens) * _KEPT >= MIN_CHUNK:
            return _KEPT
        return 1.0 if self._step.step_id % round(1 / _KEPT) == 0 else 0.0

    def chunk(self, request: Request, start: int, kept: float) -> int:
        """Returns how many tokens of a prompt to compute, from position `start` on; 0: none for now.

        kept: the share that is left to the first prompt; if it is 0, every step has a chunk of some prompt.
        """
        wanted = self._limits.chunk(len(request.token_ids) - start, self._all.num_tokens, self._is_alone)
        if not self._limits.splits_prompts:
            return wanted
        least = 0 if kept or self._step.work.num_prompt_tokens else MIN_CHUNK
        fitting = self._all.fit(start, wanted, kept=kept, least=least)
        if fitting and self._over_served is not None and self._is_over_served(request):
            fitting = self._over_served.fit(start, fitting, least=least)
        return fitting if fitting == wanted else self._aligned(fitting)

    def _aligned(self, num_tokens: int) -> int:
        """Returns `num_tokens`, or slightly fewer, so that the step needs no padding."""
        work = self._step.work
        total = work.num_decodes + work.num_prompt_tokens + num_tokens
        surplus = total % (_TILE if total < _LARGE else 2 * _TILE)
        return num_tokens - surplus if num_tokens - surplus >= MIN_CHUNK else num_tokens

    def spend(self, request: Request, start: int, num_tokens: int) -> None:
        work, costs = self._step.work, self._costs
        if self._over_served is not None and self._is_over_served(request):
            first = 0.0 if work.num_prompt_tokens else costs.first_prompt_seconds
            self._allowance.spend(first + costs.prompt_seconds(start, num_tokens))
            self._over_served.spend(start, num_tokens)
        self._all.spend(start, num_tokens)
        work.add_prompt(start, num_tokens)

    def _is_over_served(self, request: Request) -> bool:
        return self._is_contended and request.account.served > self._least_served
