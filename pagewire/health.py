"""Asks one service for its health and answers with the exit status: what a container's health check runs.

    python -m pagewire.health localhost:50053 pagewire.v1.ExecutorService
    python -m pagewire.health http://localhost:8000/readyz

Exits 0 if the service is ready, 1 with the reason if it is not, 2 when called wrongly.
"""

import http.client
import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 4.0


def grpc_problem(address: str, service: str = "") -> str | None:
    """Why `service` (grpc.health.v1; "" is the process as a whole) at `address` is not SERVING; None if it is."""
    # A probe of the gateway runs every few seconds too and has no use for gRPC.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
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
    # No proxy, whatever the environment says: a service is asked where it runs.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS):
            return None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        return f"{url}: {error}"


def http_answers(url: str) -> bool:
    """Whether anything that speaks HTTP is there, whatever it says."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m pagewire.health ADDRESS [SERVICE] | URL", file=sys.stderr)
        return 2
    is_url = arguments[0].startswith(("http://", "https://"))
    problem = http_problem(arguments[0]) if is_url else grpc_problem(*arguments)
    if problem is not None:
        print(problem, file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
