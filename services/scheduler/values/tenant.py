"""The tenant of a request, as the gateway or a key names it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str = ""
    weight: float = 0.0  # of its share among tenants; 0 stands for 1
    tokens_per_minute: int = 0  # 0: no limit


NO_TENANT = Tenant()
