"""The account of a tenant."""


class Account:
    """The served tokens of a tenant, and its numbers of requests."""

    __slots__ = ("num_running", "num_waiting", "served", "tenant", "weight")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.weight = 1.0
        self.served = 0.0
        self.num_running = 0
        self.num_waiting = 0

    @property
    def is_live(self) -> bool:
        return self.num_running + self.num_waiting > 0


# The account of requests without a ledger; never counted.
NO_ACCOUNT = Account("")
