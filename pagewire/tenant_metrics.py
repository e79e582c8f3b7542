"""What a tenant may read of metrics: of what is counted by tenant, its own."""

from collections.abc import Sequence

from pagewire.v1.admin_pb2 import ServiceMetrics

_LABEL = '{tenant="'  # the only label of these, as services write them


def of_tenant(services: Sequence[ServiceMetrics], tenant: str | None) -> list[ServiceMetrics]:
    """As they are for None."""
    if tenant is None:
        return list(services)
    name = tenant.replace("\\", "\\\\").replace('"', '\\"')
    own = f'{_LABEL}{name}"'
    return [
        ServiceMetrics(
            service=one.service,
            address=one.address,
            exposition="\n".join(line for line in one.exposition.split("\n") if _LABEL not in line or own in line),
        )
        for one in services
    ]
