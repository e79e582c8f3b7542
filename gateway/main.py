"""The gateway process."""

import asyncio
import logging
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

import grpc
import uvicorn

from gateway.app import Gateway, create_app
from pagewire import rpc
from pagewire.config import GatewayConfig
from pagewire.rpc import RpcError

logger = logging.getLogger(__name__)

# Longer than what load balancers keep idle connections for: the side that sends must not find it just closed.
KEEP_ALIVE_S = 75
# For answers that were cut to reach their clients.
LAST_WORDS_S = 2


class _Server(uvicorn.Server):
    """uvicorn, with the signals left to serve()."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


def listen(config: GatewayConfig) -> socket.socket:
    """The REST socket. Raises RuntimeError naming an address that cannot be bound."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise RuntimeError(f"cannot listen on {config.host}:{config.port}: {error.strerror}") from error
    sock.listen(2048)
    return sock


async def serve(
    config: GatewayConfig, sock: socket.socket | None = None, stop: Coroutine[None, None, object] | None = None
) -> None:
    """Serves REST until SIGINT or SIGTERM (or until `stop` returns); answers in flight then get shutdown_timeout
    seconds to end."""
    sock = sock or listen(config)
    app = create_app(config)
    server = _Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
    )
    serving = asyncio.create_task(server.serve([sock]))
    stopped = asyncio.create_task(stop or rpc.wait_for_signal())
    logger.info("REST on http://%s:%d", config.host, sock.getsockname()[1])
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        await _drain(app.state.gateway, config.shutdown_timeout)
        server.should_exit = True
    await rpc.cancel([stopped])
    await serving


async def _drain(gateway: Gateway, timeout: float) -> None:
    gateway.drain.draining = True
    try:
        await asyncio.wait_for(gateway.drain.wait_idle(), timeout)
    except TimeoutError:
        logger.warning("%d generations still running after %g s are cut off", gateway.link.num_live, timeout)
        gateway.link.fail_all(lambda: RpcError(grpc.StatusCode.UNAVAILABLE, "this gateway is shutting down; try again"))
