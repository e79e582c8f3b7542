"""Asks one service for its health and answers with the exit status: what a container's health check runs.

    python -m pagewire.wire.health localhost:50053 pagewire.v1.ExecutorService
    python -m pagewire.wire.health http://localhost:8000/readyz

Where PAGEWIRE_SSL_CERTFILE is set, as for the service itself, it is asked with TLS.

Exits 0 if the service is ready, 1 with the reason if it is not, 2 when called wrongly.
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
    """Why `service` (grpc.health.v1; "" is the process as a whole) at `address` is not SERVING; None if it is.

    files: those of the service itself, if it is served to other services with TLS. Raises StartupError for wrong ones.
    """
    # A probe of the gateway runs every few seconds too and has no use for gRPC.
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
    """Why GET `url` does not answer with 2xx; None if it does."""
    try:
        with _opener(url).open(url, timeout=TIMEOUT_SECONDS):
            return None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        return f"{url}: {error}"


def http_answers(url: str) -> bool:
    """Whether anything that speaks HTTP is there, whatever it says."""
    try:
        with _opener(url).open(url, timeout=TIMEOUT_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _opener(url: str) -> urllib.request.OpenerDirector:
    # No proxy, whatever the environment says: a service is asked where it runs. That is no name of its certificate, and
    # nothing is told that an impostor could use.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https://"):
        handlers.append(urllib.request.HTTPSHandler(context=client_context(NO_FILES, checks_server=False)))
    return urllib.request.build_opener(*handlers)


def _channel(address: str, files: Files | None) -> grpc.Channel:
    import grpc

    if files is None:
        return grpc.insecure_channel(address)
    # The service's own certificate is shown to it, and its name expected of it.
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
