"""The targets of OpenTelemetry data, from --otlp-traces-endpoint and OpenTelemetry's variables.

The exporters read the variables for headers, timeouts, certificates and compression themselves, and the SDK reads those
for samplers, batches and limits.
"""

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from opentelemetry.sdk.resources import Resource

from pagewire.errors import StartupError
from pagewire.version import __version__

GRPC, HTTP = "grpc", "http/protobuf"


class Target(NamedTuple):
    """An OTLP endpoint."""

    endpoint: str
    protocol: str  # GRPC or HTTP

    @property
    def insecure(self) -> bool:
        """True without TLS; by default, the exporter uses TLS for addresses without a scheme."""
        return not self.endpoint.startswith("https://")


def target(signal: str, given: str | None, environ: Mapping[str, str] = os.environ) -> Target | None:
    """Returns the target of a signal, "traces" or "metrics"; None if it is not exported.

    given: the value of its flag, which precedes the variables. Raises StartupError for an unsupported protocol.
    """
    if (
        environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get(f"OTEL_{signal.upper()}_EXPORTER") == "none"
    ):
        return None
    own, common = f"OTEL_EXPORTER_OTLP_{signal.upper()}", "OTEL_EXPORTER_OTLP"
    name, protocol = next(
        ((name, environ[name]) for name in (f"{own}_PROTOCOL", f"{common}_PROTOCOL") if environ.get(name)), ("", GRPC)
    )
    if protocol not in (GRPC, HTTP):
        raise StartupError(f"{name}={protocol} is not supported; set it to {GRPC} or {HTTP}")
    endpoint = given or environ.get(f"{own}_ENDPOINT")
    if not endpoint and (base := environ.get(f"{common}_ENDPOINT")):
        endpoint = f"{base.rstrip('/')}/v1/{signal}" if protocol == HTTP else base
    if not endpoint:
        return None
    if protocol == HTTP and given and endpoint.count("/") <= 2:
        endpoint = f"{endpoint.rstrip('/')}/v1/{signal}"
    return Target(endpoint, protocol)


def resource(service: str, environ: Mapping[str, str] = os.environ) -> Resource:
    """Returns the resource of this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence."""
    attributes: dict[str, str | int] = {
        "service.name": f"pagewire-{service}",
        "service.namespace": "pagewire",
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        "pagewire.service": service,
    }
    said = dict(Resource.create().attributes)
    named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named:
        said.pop("service.name", None)
    return Resource({**attributes, **said})
