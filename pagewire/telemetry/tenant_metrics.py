"""Metrics by tenant: what the label says, and what a tenant may read of them, its own."""

from collections.abc import Sequence

from pagewire.v1.admin_pb2 import ServiceMetrics

# Whose requests name no tenant: the label of an empty name would be none, and dashboards would show a line without a
# name. A tenant of that name is among them.
UNNAMED = "none"
_LABEL = '{tenant="'  # the only label of these, as services write them


def label_of(tenant: str) -> str:
    return tenant or UNNAMED


def of_tenant(services: Sequence[ServiceMetrics], tenant: str | None) -> list[ServiceMetrics]:
    """As they are for None."""
    if tenant is None:
        return list(services)
    name = label_of(tenant).replace("\\", "\\\\").replace('"', '\\"')
    own = f'{_LABEL}{name}"'
    return [
        ServiceMetrics(
            service=one.service,
            address=one.address,
            exposition="\n".join(line for line in one.exposition.split("\n") if _LABEL not in line or own in line),
        )
        for one in services
    ]
