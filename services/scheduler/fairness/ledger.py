"""Fairness among tenants: the requests of the tenant that was served least go first.

Each tenant has a virtual token counter (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the
served prompt tokens plus twice the output tokens, divided by the tenant's weight. The tenant with the lowest counter
has the next turn; among its requests, the policy decides. No tenant saves up: the counter of a returning tenant is
raised to the lowest of the present ones. Tokens are counted as they are computed, also while a tenant is alone: a
tenant that comes while another one's long prompt is computed then has its turn between two parts of it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pagewire.services.scheduler.values.account import Account
from pagewire.services.scheduler.values.request import Request

# The weights of tokens in VTC.
_OUTPUT_CHARGE = 2.0
# The number of counters of tenants without requests that are kept. Forgetting one loses only its excess over others.
_MAX_IDLE = 1024


class Ledger:
    """The accounts of all tenants that have requests, and of some that had."""

    def __init__(self) -> None:
        self._live: dict[str, Account] = {}
        self._idle: OrderedDict[str, Account] = OrderedDict()
        self._last_served = 0.0  # the counter of the tenant that left last

    @property
    def is_contended(self) -> bool:
        """True if several tenants have requests; otherwise there is nothing to divide."""
        return len(self._live) > 1

    @property
    def live(self) -> Iterable[Account]:
        return self._live.values()

    def account(self, tenant: str, weight: float = 1.0) -> Account:
        """Returns the tenant's account, with this weight from now on; 0 stands for 1."""
        account = self._live.get(tenant) or self._idle.get(tenant) or Account(tenant)
        account.weight = weight if weight > 0 else 1.0
        return account

    def share(self, account: Account) -> float:
        """Returns the tenant's share by weight, above 0 and at most 1, among itself and all tenants with requests."""
        total = sum(other.weight for other in self._live.values())
        return account.weight / (total if account.is_live else total + account.weight)

    def count(self, account: Account, *, waiting: int = 0, running: int = 0) -> None:
        """Adds to the numbers of requests of this tenant that wait and run."""
        was_live = account.is_live
        account.num_waiting += waiting
        account.num_running += running
        if account.is_live and not was_live:
            self._enter(account)
        elif was_live and not account.is_live:
            self._leave(account)

    def charge_prompt(self, request: Request, end: int) -> None:
        """Charges the tokens of a prompt up to position `end` that were never charged: a request that loses its blocks
        does not pay for them again."""
        end = min(end, request.num_prompt_tokens)
        start = max(request.num_computed_tokens, request.num_charged_tokens)
        if end > start:
            request.account.served += (end - start) / request.account.weight
            request.num_charged_tokens = end

    def charge_outputs(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> None:
        """Charges the tokens that running requests gained."""
        if len(self._live) == 1:  # the rows of this account
            (account,) = self._live.values()
            account.served += _OUTPUT_CHARGE * sum(num_tokens) / account.weight
            return
        for request, num in zip(requests, num_tokens, strict=True):
            request.account.served += _OUTPUT_CHARGE * num / request.account.weight

    def least_served_running(self) -> float:
        """Returns the lowest counter among tenants with running requests."""
        return min((account.served for account in self._live.values() if account.num_running), default=float("inf"))

    def _enter(self, account: Account) -> None:
        self._idle.pop(account.tenant, None)
        lowest = min((other.served for other in self._live.values()), default=self._last_served)
        account.served = max(account.served, lowest)
        self._live[account.tenant] = account

    def _leave(self, account: Account) -> None:
        del self._live[account.tenant]
        self._last_served = account.served
        self._idle[account.tenant] = account
        if len(self._idle) > _MAX_IDLE:
            self._idle.popitem(last=False)
