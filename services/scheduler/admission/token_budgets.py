"""Limits of tokens per minute, for tenants with such a key: prompts count at admission, outputs as they are generated.

A budget fills up within a minute. A request of any size is admitted while some budget is left, and what it uses beyond
that is a debt: the next request has to wait until the debt is paid. Over time, no tenant uses more than its limit, and
no request is too large for it. Steps do no counting: outputs are counted at the next check.
"""

import math

from pagewire.services.scheduler.admission.admission import WaitTooLong
from pagewire.services.scheduler.values.request import Request


class _Budget:
    """The budget of one tenant. Times are of time.monotonic()."""

    def __init__(self, tokens_per_minute: int, now: float) -> None:
        self._most = float(tokens_per_minute)
        self._left = float(tokens_per_minute)
        self._at = now
        self._counted: dict[Request, int] = {}  # tokens of outputs, by live request

    def set_limit(self, tokens_per_minute: int) -> None:
        self._most = float(tokens_per_minute)

    def seconds_until_some_are_left(self, now: float) -> float:
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now
        for request, counted in self._counted.items():
            self._left -= request.num_output_tokens - counted
            self._counted[request] = request.num_output_tokens
        return 60 * (1 - self._left) / self._most if self._left < 1 else 0.0

    def add(self, request: Request) -> None:
        self._left -= request.num_prompt_tokens
        self._counted[request] = request.num_output_tokens  # those of an earlier attempt are counted

    def remove(self, request: Request) -> None:
        if (counted := self._counted.pop(request, None)) is not None:
            self._left -= request.num_output_tokens - counted


class TokenBudgets:
    """The budgets of all tenants that have a limit."""

    def __init__(self) -> None:
        self._budgets: dict[str, _Budget] = {}

    def check(self, request: Request, now: float) -> None:
        """Raises WaitTooLong if the budget is used up, with the time after which it is not."""
        if not (limit := request.tenant.tokens_per_minute):
            self._budgets.pop(request.tenant.name, None)
            return
        budget = self._budgets.setdefault(request.tenant.name, _Budget(limit, now))
        budget.set_limit(limit)
        # A request that was admitted before is not refused later.
        if (seconds := budget.seconds_until_some_are_left(now)) and not request.is_resubmitted:
            message = (
                f"{request.tenant.name} has used {limit} tokens a minute, as many as its key allows: try again in"
                f" {math.ceil(seconds)} s"
            )
            raise WaitTooLong(message, "tokens_per_minute", seconds)

    def add(self, request: Request) -> None:
        """Takes in that a request was admitted."""
        if budget := self._budgets.get(request.tenant.name):
            budget.add(request)

    def remove(self, request: Request) -> None:
        """Takes in that a request has ended."""
        if budget := self._budgets.get(request.tenant.name):
            budget.remove(request)
