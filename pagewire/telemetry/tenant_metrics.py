"""Metrics by tenant: the label, and the part of them that a tenant may read."""

from collections.abc import Sequence

from pagewire.v1.admin_pb2 import ServiceMetrics

# The label of requests without a tenant: dashboards would show an empty label as a line without a name. It is shared
# with a tenant of this name.
UNNAMED = "none"
_LABEL = '{tenant="'  # the only label of these metrics


def label_of(tenant: str) -> str:
    return tenant or UNNAMED


def of_tenant(services: Sequence[ServiceMetrics], tenant: str | None) -> list[ServiceMetrics]:
    """Returns the metrics without those of other tenants; all metrics for None."""
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
