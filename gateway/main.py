"""The gateway process."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import grpc
import uvicorn
from starlette.applications import Starlette

from pagewire.config import GatewayConfig
from pagewire.errors import StartupError
from pagewire.gateway.app import Parts, create_admin_app, create_app, create_metrics_app
from pagewire.gateway.batches.in_process import InProcess
from pagewire.gateway.batches.worker import BatchWorker
from pagewire.gateway.http.connection_limits import BACKLOG, Limits
from pagewire.gateway.http.connections import Connections
from pagewire.gateway.http.http_connection import Connection
from pagewire.gateway.http.tls_listener import TlsListener
from pagewire.gateway.store import Store, data_directory
from pagewire.wire import rpc, tenants
from pagewire.wire.secure_rpc import NO_TLS, ServiceTls

logger = logging.getLogger(__name__)

# The kernel closes a connection if the client acknowledges no data for this long.
UNREAD_TIMEOUT_S = 60.0
# Seconds in which clients read the last bytes of their answers when the process ends.
LAST_WORDS_S = 2.0


class _Server(uvicorn.Server):
    """uvicorn, with signals handled by serve() and TLS by our listener."""

    def __init__(
        self, config: uvicorn.Config, listener: Callable[[socket.socket, uvicorn.Server], TlsListener] | None
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._listener is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self.servers = [self._listener(sock, self) for sock in sockets or ()]  # type: ignore[misc]

    async def main_loop(self) -> None:
        """Renews the Date header each second until stop(); uvicorn's own loop wakes ten times as often."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes listeners and connections, busy ones after their answers; uvicorn's own waits 0.1 s even for none."""
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                while connections or tasks:
                    for connection in list(connections):
                        connection.shutdown()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            logger.warning(
                "%d connections are cut off: their answers did not end within %g s", len(connections), LAST_WORDS_S
            )
            for connection in list(connections):
                connection.transport.abort()
            if cancelled := set(tasks):
                for task in cancelled:
                    task.cancel()
                await asyncio.wait(cancelled, timeout=LAST_WORDS_S)
        await asyncio.gather(*(server.wait_closed() for server in self.servers))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


def listen(config: GatewayConfig) -> socket.socket:
    """Returns the REST socket; with reuse_port, other processes can listen on its address, too.

    Raises StartupError, which names the address.
    """
    return _listen(config.host, config.port, ("--host", "--port"), reuse_port=config.reuse_port)


def listen_for_operators(config: GatewayConfig) -> socket.socket | None:
    """Returns the socket of --admin-port, as listen() does; None without that flag."""
    if config.admin_port is None:
        return None
    flags = ("--admin-host", "--admin-port")
    return _listen(config.admin_host, config.admin_port, flags, reuse_port=config.reuse_port)


def listen_for_scrapers(config: GatewayConfig) -> socket.socket | None:
    """Returns the socket of --metrics-port, as listen() does; None without that flag."""
    if config.metrics_port is None:
        return None
    flags = ("--admin-host", "--metrics-port")
    return _listen(config.admin_host, config.metrics_port, flags, reuse_port=config.reuse_port)


def _listen(host: str, port: int, flags: tuple[str, str], *, reuse_port: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, flags, error) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_TIMEOUT_S * 1000))
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, flags, error) from error
    return sock


def _cannot_listen(host: str, port: int, flags: tuple[str, str], error: OSError) -> StartupError:
    return StartupError(
        f"cannot listen on {host}:{port} ({error.strerror or error}): stop the process that uses it, or set another"
        f" address with {flags[0]} and {flags[1]}"
    )


async def serve(
    config: GatewayConfig,
    sock: socket.socket | None = None,
    stop: Coroutine[None, None, bool] | None = None,
    limits: Limits | None = None,
) -> None:
    """Serves REST until SIGTERM, or until `stop` returns True; requests in flight then get shutdown_timeout seconds.
    After SIGINT they get none.

    limits: of connections; by default, as the descriptors of this process allow.

    Raises StartupError.
    """
    tenants.check_header(config.tenant_header)
    tls = ServiceTls(config, config.tokenizer_address.split(","))
    scheme = "http" if tls.certificates is None else "https"
    sock = sock or listen(config)
    store = Store(data_directory(config.data_dir, sock.getsockname()[1]))
    parts = Parts.of(config, store, tls)
    app = create_app(config, parts)
    for_operators, for_scrapers = listen_for_operators(config), listen_for_scrapers(config)
    worker = BatchWorker(parts.batches, parts.files, parts.tokenizer, InProcess(app), config.batch_concurrency)
    connections = Connections(limits or Limits.of_this_process())
    servers = {_server(app, connections, tls): sock}
    if for_operators is not None:
        servers[_server(create_admin_app(config, parts), connections, tls)] = for_operators
        logger.info("routes for operators on %s://%s:%d", scheme, config.admin_host, for_operators.getsockname()[1])
    if for_scrapers is not None:
        servers[_server(create_metrics_app(parts), connections, NO_TLS)] = for_scrapers
        logger.info("metrics on http://%s:%d/metrics", config.admin_host, for_scrapers.getsockname()[1])
    await parts.siblings.start()
    link = asyncio.create_task(parts.tokenizer.link.run())
    batches = asyncio.create_task(worker.run())
    background = asyncio.create_task(parts.background.run())
    serving = [asyncio.create_task(server.serve([one])) for server, one in servers.items()]
    watching = asyncio.create_task(connections.watch())
    stopped = asyncio.create_task(stop or rpc.wait_for_signal())
    logger.info("REST on %s://%s:%d", scheme, config.host, sock.getsockname()[1])
    try:
        running = {link, *serving, watching, batches, background}
        ended, _ = await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            raise RuntimeError("the gateway ended by itself") from ended.pop().exception()
        parts.shutdown.announced = True
        worker.stop()
        await rpc.cancel([background])  # other processes continue its responses
        if stopped.result():
            await asyncio.sleep(config.drain_delay)
        await _drain(parts, config.shutdown_timeout if stopped.result() else 0.0)
        for server in servers:
            server.stop()
        await asyncio.wait(serving)
    finally:
        await rpc.cancel([stopped, *serving, watching, batches, background, link])
        await parts.siblings.close()
        await parts.keeper.close()
        await store.close()


def _server(app: Starlette, connections: Connections, tls: ServiceTls) -> _Server:
    """Returns a server; all servers of a process share the limits of connections."""
    return _Server(
        uvicorn.Config(
            app,
            loop="none",
            http=partial(Connection, connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            # A burst must not take all descriptors.
            backlog=connections.limits.reserve,
        ),
        None if tls.certificates is None else partial(TlsListener, tls, connections),
    )


async def _drain(parts: Parts, timeout: float) -> None:
    parts.shutdown.begun = True
    try:
        async with asyncio.timeout(timeout):
            await parts.shutdown.wait_idle()
    except TimeoutError:
        logger.warning("%d generations still run after %g s and are cut off", parts.tokenizer.link.num_live, timeout)
        parts.tokenizer.link.fail_all(grpc.StatusCode.UNAVAILABLE, "this gateway is shutting down; try again")
