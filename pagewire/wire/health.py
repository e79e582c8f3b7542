"""Checks the health of one service, for health checks of containers; the exit status is the result.

    python -m pagewire.wire.health localhost:50053 pagewire.v1.ExecutorService
    python -m pagewire.wire.health http://localhost:8000/readyz

If PAGEWIRE_SSL_CERTFILE is set, as it is for the service itself, the check uses TLS.

Exits 0 if the service is ready, 1 with the reason if it is not, 2 for wrong usage.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from pagewire.errors import StartupError
from pagewire.wire.tls import NO_FILES, Certificates, Files, client_context

if TYPE_CHECKING:
    import grpc

TIMEOUT_SECONDS = 4.0


def grpc_problem(address: str, service: str = "", files: Files | None = None) -> str | None:
    """Returns why `service` at `address` is not SERVING by grpc.health.v1; None if it is. "" is the whole process.

    files: those of the service itself, if it serves other services with TLS. Raises StartupError for unusable files.
    """
    # Deferred: probes of the gateway, every few seconds, do not need gRPC.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with _channel(address, files) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return f"{address}: {service or 'the process'} is {status}"


def http_problem(url: str) -> str | None:
    """Returns why GET `url` did not answer with 2xx; None if it did."""
    try:
        with _opener(url).open(url, timeout=TIMEOUT_SECONDS):
            return None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        return f"{url}: {error}"


def http_answers(url: str) -> bool:
    """Returns whether an HTTP server answers at the URL, with any status."""
    try:
        with _opener(url).open(url, timeout=TIMEOUT_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _opener(url: str) -> urllib.request.OpenerDirector:
    # Proxies in the environment are ignored: a service is asked directly. Its certificate is not checked, because it
    # does not name this address, and the request contains no secret.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https://"):
        handlers.append(urllib.request.HTTPSHandler(context=client_context(NO_FILES, checks_server=False)))
    return urllib.request.build_opener(*handlers)


def _channel(address: str, files: Files | None) -> grpc.Channel:
    import grpc

    if files is None:
        return grpc.insecure_channel(address)
    # The check uses the service's own certificate, and expects its name.
    own = Certificates(files).current()
    options = [("grpc.ssl_target_name_override", own.names[0].replace("*", "any"))] if own.names else []
    credentials = grpc.ssl_channel_credentials(own.ca_certs, own.key, own.certificate)
    return grpc.secure_channel(address, credentials, options)


def _files_of_service() -> Files | None:
    names = {name: os.environ.get(f"PAGEWIRE_SSL_{name.upper()}") for name in ("certfile", "keyfile", "ca_certs")}
    return Files(**names) if names["certfile"] else None


def _problem(address: str, service: str = "") -> str | None:
    files = _files_of_service()
    if address.startswith(("http://", "https://")):
        return http_problem(address if files is None else address.replace("http://", "https://", 1))
    has_tls = files is not None and files.ca_certs and not address.startswith("unix:")
    return grpc_problem(address, service, files if has_tls else None)


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m pagewire.wire.health ADDRESS [SERVICE] | URL", file=sys.stderr)
        return 2
    try:
        problem = _problem(*arguments)
    except StartupError as error:
        problem = str(error)
    if problem is not None:
        print(problem, file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
