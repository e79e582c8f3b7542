"""The gateway process."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import grpc
import uvicorn
from starlette.applications import Starlette

from pagewire.config import GatewayConfig
from pagewire.errors import StartupError
from pagewire.gateway.app import Parts, create_admin_app, create_app, create_metrics_app
from pagewire.gateway.batches.in_process import InProcess
from pagewire.gateway.batches.worker import BatchWorker
from pagewire.gateway.core.reading.json_content import limit_integers
from pagewire.gateway.http.connection_limits import BACKLOG, Limits
from pagewire.gateway.http.connections import Connections
from pagewire.gateway.http.cors import Cors
from pagewire.gateway.http.http_connection import Connection
from pagewire.gateway.http.tls_listener import TlsListener
from pagewire.gateway.store import Store, data_directory
from pagewire.wire import rpc, tenants
from pagewire.wire.addresses import endpoint
from pagewire.wire.secure_rpc import NO_TLS, ServiceTls

logger = logging.getLogger(__name__)

# The kernel closes a connection if the client acknowledges no data for this long.
UNREAD_TIMEOUT_S = 60.0
# Seconds in which clients read the last bytes of their answers when the process ends.
LAST_WORDS_S = 2.0
# Seconds after which the event loop has closed its copy of a listening socket: several of its turns.
_COPIES_CLOSED_S = 0.02
# Seconds in which clients that have just connected send their request.
_FIRST_REQUEST_S = 0.5


class _Server(uvicorn.Server):
    """uvicorn, with signals handled by serve() and TLS by our listener."""

    def __init__(
        self, config: uvicorn.Config, listener: Callable[[socket.socket, uvicorn.Server], TlsListener] | None
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._stopping = asyncio.Event()
        self._listening: list[socket.socket] = []
        self._taking: list[asyncio.Task[Any]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._listening = sockets or []
        if self._listener is None:
            # The event loop closes its own copies a moment after it is asked to; see leave().
            await super().startup([sock.dup() for sock in self._listening])
            return
        await super().startup([])
        self.servers = [self._listener(sock, self) for sock in self._listening]  # type: ignore[misc]

    async def leave(self) -> None:
        """Stops listening, so that new connections reach only other processes at this address. Those that the system
        has accepted for this process are taken."""
        for server in self.servers:
            if isinstance(server, TlsListener):
                server.stop_accepting()
            else:
                server.close()
        await asyncio.sleep(_COPIES_CLOSED_S)
        for listening in self._listening:
            listening.setblocking(False)
            with suppress(OSError):  # there are no more, or no descriptors for them
                while True:
                    self._take(listening.accept()[0])
            listening.close()
        await asyncio.gather(*self._taking, return_exceptions=True)

    def _take(self, accepted: socket.socket) -> None:
        for server in self.servers:
            if isinstance(server, TlsListener):
                server.take(accepted)
                return
        connecting = asyncio.get_running_loop().connect_accepted_socket(
            lambda: self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state={}
            ),
            accepted,
        )
        self._taking.append(asyncio.create_task(connecting))

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
        for server in self.servers:
            server.close()
        for listening in self._listening:
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
        f"cannot listen on {endpoint(host, port)} ({error.strerror or error}): stop the process that uses it, or set"
        f" another address with {flags[0]} and {flags[1]}"
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
    limit_integers()
    cors = Cors.of(config)
    tls = ServiceTls(config, (config.lines_address or config.tokenizer_address).split(","))
    scheme = "http" if tls.certificates is None else "https"
    sock = sock or listen(config)
    store = Store(data_directory(config.data_dir, sock.getsockname()[1]))
    parts = Parts.of(config, store, tls)
    app = create_app(config, parts, cors)
    for_operators, for_scrapers = listen_for_operators(config), listen_for_scrapers(config)
    worker = BatchWorker(parts.batches, parts.files, parts.models, InProcess(app), config.batch_concurrency)
    connections = Connections(limits or Limits.of_this_process(), cors)
    public = _server(app, connections, tls)
    servers = {public: sock}
    if for_operators is not None:
        servers[_server(create_admin_app(config, parts), connections, tls)] = for_operators
        logger.info(
            "routes for operators on %s://%s", scheme, endpoint(config.admin_host, for_operators.getsockname()[1])
        )
    if for_scrapers is not None:
        servers[_server(create_metrics_app(parts), connections, NO_TLS)] = for_scrapers
        logger.info("metrics on http://%s/metrics", endpoint(config.admin_host, for_scrapers.getsockname()[1]))
    await parts.siblings.start()
    models = asyncio.create_task(parts.models.run())
    batches = asyncio.create_task(worker.run())
    background = asyncio.create_task(parts.background.run())
    serving = [asyncio.create_task(server.serve([one])) for server, one in servers.items()]
    watching = asyncio.create_task(connections.watch())
    stopped = asyncio.create_task(stop or rpc.wait_for_signal())
    logger.info("REST on %s://%s", scheme, endpoint(config.host, sock.getsockname()[1]))
    try:
        running = {models, *serving, watching, batches, background}
        ended, _ = await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            raise RuntimeError("the gateway ended by itself") from ended.pop().exception()
        parts.shutdown.announced = True
        worker.stop()
        await rpc.cancel([background])  # other processes continue its responses
        if stopped.result():
            await asyncio.sleep(config.drain_delay)
            await public.leave()
            await _first_requests(connections)
        await _drain(parts, config.shutdown_timeout if stopped.result() else 0.0)
        parts.shutdown.over = True
        for server in servers:
            server.stop()
        await asyncio.wait(serving)
    finally:
        await rpc.cancel([stopped, *serving, watching, batches, background, models])
        await parts.siblings.close()
        await parts.keeper.close()
        parts.batches.suspects.close()
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


async def _first_requests(connections: Connections) -> None:
    """Waits a moment for the requests of clients that connected before this process stopped listening."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_REQUEST_S):
            while connections.expect_requests():  # noqa: ASYNC110 - any of many may change
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)  # the requests begin


async def _drain(parts: Parts, timeout: float) -> None:
    parts.shutdown.begun = True
    error = rpc.RpcError(grpc.StatusCode.UNAVAILABLE, "this gateway is shutting down; try again")
    stack = parts.models.stack
    ending = [] if stack is None else [asyncio.create_task(stack.end_loads(parts.models, error))]
    try:
        async with asyncio.timeout(timeout):
            await parts.shutdown.wait_idle()
    except TimeoutError:
        logger.warning("%d generations still run after %g s and are cut off", parts.models.num_live, timeout)
        parts.shutdown.over = True
        parts.models.fail_all(error)
    finally:
        await rpc.cancel(ending)
