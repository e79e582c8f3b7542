"""Asking a service once whether it can work. An answer of any kind but yes is no."""

import asyncio
from contextlib import suppress
from pathlib import Path

PROBE_TIMEOUT_S = 2.0


async def grpc_ready(address: str, service: str) -> bool:
    """grpc.health.v1 at "unix:/path" or "host:port" for a full name such as "pagewire.v1.ExecutorService"."""
    if not _may_listen(address):
        return False
    # Imported once a service listens: until then the processor belongs to the services that are starting.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    # A channel of its own: a shared one would wait out the back-off of earlier attempts.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def http_ready(host: str, port: int, path: str = "/readyz") -> bool:
    """Whether a GET is answered with 200."""
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, IndexError):
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await _http_status(host, port, path) == b"200"
    return False


async def _http_status(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return (await reader.readline()).split()[1]
    finally:
        writer.close()


def _may_listen(address: str) -> bool:
    return not address.startswith("unix:") or Path(address.removeprefix("unix:")).exists()
