"""Servers and channels of gRPC for every service: options, health, reflection, signals, trace context."""

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.errors import StartupError
from pagewire.process.process import open_descriptors, raise_descriptor_limit
from pagewire.process.watchdog import watched
from pagewire.telemetry.recent import Accounts
from pagewire.telemetry.trace import Trace
from pagewire.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from pagewire.wire.admin import Adapters, AdminServicer, Describe, Neighbour, PrefixCaches, ReplaceWeights, Sleep
from pagewire.wire.introspection import HealthServicer, add_reflection
from pagewire.wire.local import unix_sockets
from pagewire.wire.local.channel import LocalChannel
from pagewire.wire.local.server import LocalServer
from pagewire.wire.status import error_details
from pagewire.wire.status.rpc_error import RpcError as RpcError
from pagewire.wire.status.status_interceptor import StatusInterceptor

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# The most connections at each address of a server; fewer if the process may not have as many descriptors.
MAX_CONNECTIONS = 10_000
KEEPALIVE_MS = 20_000
# Time for the last messages to reach clients.
LAST_CALLS_S = 1.0

_COMMON_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
_SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Connections without HTTP/2, or without calls for long, are closed; streams between services are always calls.
    ("grpc.server_handshake_timeout_ms", 15_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.max_concurrent_streams", 10_000),
    # A second process must fail to bind instead of sharing the port.
    ("grpc.so_reuseport", 0),
]
_CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    # The time between attempts, so that a neighbour is found soon after it is back. An attempt may take gRPC's 20
    # seconds; min_reconnect_backoff_ms, despite its name, is the time after which an attempt is given up.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 150),
    # A new pod or container may have another address; gRPC would resolve the name only twice a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    # Each neighbour has its own channel: no other code may share, or close, its connection.
    ("grpc.use_local_subchannel_pool", 1),
]


def channel(address: str, credentials: grpc.ChannelCredentials | None = None, host: str = "") -> grpc.aio.Channel:
    """Returns a channel to a neighbour: "unix:/path", "host:port" or any gRPC target.

    credentials: for TLS. host: the name that its certificate must have; "": that of the address.
    """
    if credentials is not None:
        names = [("grpc.ssl_target_name_override", host)] if host else []
        return grpc.aio.secure_channel(address, credentials, options=[*_CHANNEL_OPTIONS, *names])
    over_grpc = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    if (path := unix_sockets.stream_path(address)) is None:
        return over_grpc
    return cast(grpc.aio.Channel, LocalChannel(over_grpc, path, MAX_MESSAGE_BYTES))


def timeout_of(context: common_pb2.RequestContext) -> float | None:
    """Returns the seconds that a request has left; None: no limit. Raises RpcError DEADLINE_EXCEEDED if none are
    left."""
    if not context.HasField("timeout"):
        return None
    if (seconds := error_details.seconds(context.timeout)) <= 0:
        raise RpcError(
            grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the request passed before it arrived; set a later one"
        )
    return seconds


def deadline_of(context: common_pb2.RequestContext) -> float | None:
    """Returns the deadline of a request that arrives now, by time.monotonic(); None: none."""
    return time.monotonic() + error_details.seconds(context.timeout) if context.HasField("timeout") else None


def set_timeout(context: common_pb2.RequestContext, call: grpc.aio.ServicerContext) -> None:
    """Sets the timeout of a request from the deadline of its call."""
    # Without a deadline, it is None or many years.
    if (seconds := call.time_remaining()) is not None and seconds < 1e9:
        context.timeout.CopyFrom(error_details.duration(max(0.0, seconds)))


def trace_of(context: grpc.aio.ServicerContext) -> Trace:
    """Returns the trace in the metadata of a call."""
    return Trace.of_client(context.invocation_metadata() or ())


async def _no_streams() -> None:
    """Does nothing: the default of servers without streams that end on request."""


@dataclass
class Server:
    """The gRPC server of a service process.

    Call `add(servicer, add_to_server, name)` for each service, `await start()`, and `set_serving(True)` when it can
    work. `await stop()` lets requests finish first, within `shutdown_timeout` seconds.

    drain_delay: None for a server of neighbours, which resubmit the requests of broken streams. A public server refuses
    new calls this many seconds after the stop began, when load balancers know that it is not ready.
    """

    addresses: Sequence[str]
    shutdown_timeout: float = 30.0
    max_request_bytes: int = MAX_MESSAGE_BYTES
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    drain_delay: float | None = None
    credentials: grpc.ServerCredentials | None = None  # for TLS, at addresses that are not unix sockets
    max_connections: int = MAX_CONNECTIONS
    _statuses: StatusInterceptor = field(init=False)
    _server: grpc.aio.Server = field(init=False)
    _local: LocalServer = field(init=False)
    _health: HealthServicer = field(init=False)
    _names: list[str] = field(init=False, default_factory=list)
    _links: set[str] = field(init=False, default_factory=set)
    _is_serving: bool = field(init=False, default=False)
    _is_stopping: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._statuses = StatusInterceptor()
        interceptors = [self._statuses, *self.interceptors]
        self._server = grpc.aio.server(interceptors=interceptors, options=self._options())
        self._local = LocalServer(interceptors, self.max_request_bytes)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def _options(self) -> list[tuple[str, int]]:
        free = max(8, raise_descriptor_limit() - open_descriptors())
        own = {
            "grpc.max_receive_message_length": self.max_request_bytes,
            "grpc.max_allowed_incoming_connections": min(self.max_connections, free * 3 // 4),
        }
        return list((dict(_SERVER_OPTIONS) | own).items())  # gRPC would use the first of two values

    def add(
        self, servicer: Any, add_to_server: Callable[[Any, grpc.aio.Server], None], name: str, *, is_link: bool = False
    ) -> None:
        """Adds a service. name: its full name, for instance inference_pb2.DESCRIPTOR.services_by_name[...].full_name.

        is_link: neighbours use it; its health stays SERVING while the process drains.
        """
        add_to_server(servicer, self._server)
        if self.drain_delay is None:
            add_to_server(servicer, cast(grpc.aio.Server, self._local))
        self._names.append(name)
        if is_link:
            self._links.add(name)

    def add_admin(
        self,
        service: str,
        behind: Callable[[], Sequence[Neighbour]] = lambda: (),
        describe: Describe = lambda status, with_kv_maps: None,
        replace_weights: ReplaceWeights | None = None,
        accounts: Accounts | None = None,
        adapters: Adapters | None = None,
        caches: PrefixCaches | None = None,
        sleep: Sleep | None = None,
    ) -> None:
        """Adds AdminService.

        behind: returns the current neighbours behind this service. describe: fills in the details of its status.
        replace_weights, accounts, adapters, caches, sleep: if the service offers them.
        """
        name = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
        servicer = AdminServicer(
            service, behind, lambda: self._is_ready, describe, replace_weights, accounts, adapters, caches, sleep
        )
        self.add(servicer, admin_pb2_grpc.add_AdminServiceServicer_to_server, name)

    @property
    def _is_ready(self) -> bool:
        """True if the service is ready for clients."""
        return self._is_serving and not self._is_stopping

    async def start(self) -> None:
        """Listens; NOT_SERVING until set_serving(). Raises StartupError naming an address that cannot be bound."""
        add_reflection([*self._names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name], self._server)
        await self.set_serving(False)
        for address in self.addresses:
            if address.startswith("unix:") and unix_sockets.is_served(address.removeprefix("unix:")):
                raise StartupError(
                    f"cannot listen on {address}: another process serves it; stop it, or use another address"
                )
            await self._local.listen(address)
            try:
                bound = self._bind(address)
            except RuntimeError as error:
                raise StartupError(f"cannot listen on {address}: another process may use it ({error})") from error
            if not bound and not address.startswith("unix:"):
                raise StartupError(f"cannot listen on {address}: another process may use it")
        await self._server.start()

    def _bind(self, address: str) -> int:
        """Binds an address, and returns gRPC's result: the port, if it has one. Raises RuntimeError."""
        if self.credentials is not None and not address.startswith("unix:"):
            return self._server.add_secure_port(address, self.credentials)
        with unix_sockets.private():
            return self._server.add_insecure_port(address)

    async def set_serving(self, serving: bool) -> None:
        """Sets whether this service can work. "" (the whole process) is SERVING while it listens: liveness."""
        status = health_pb2.HealthCheckResponse
        self._is_serving = serving
        await self._health.set("", status.SERVING)
        for name in self._names:
            is_ready = self._is_ready or (serving and name in self._links)
            await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)

    async def links_ended(self) -> None:
        """Waits until streams of requests, which end by themselves, have sent why; at most LAST_CALLS_S seconds."""
        await self._statuses.links_ended(LAST_CALLS_S)

    async def stop(
        self,
        drained: Callable[[], Awaitable[object]] | None = None,
        finish_streams: Callable[[], Awaitable[object]] = _no_streams,
    ) -> None:
        """Becomes not ready at once, and waits until `drained` returns (no live requests) and the last outputs are
        written, at most shutdown_timeout s and a few times LAST_CALLS_S.

        Without `drained`, running requests are cut off. Streams of neighbours continue until then, also with new
        requests. finish_streams: ends them, and returns once they have written what they hold.
        """
        self._is_stopping = True
        await self.set_serving(self._is_serving)
        refusing: asyncio.Task[None] | None = None
        if drained is not None:
            if self.drain_delay is not None:
                await asyncio.sleep(self.drain_delay)
                refusing = asyncio.create_task(self._server.stop(grace=self.shutdown_timeout + 3 * LAST_CALLS_S))
            await self._drain(drained, finish_streams)
        if self.drain_delay is None:
            # Cuts off the streams and calls of neighbours that have not ended; they reconnect elsewhere.
            await self._local.stop()
            await self._server.stop(grace=None)
            return
        self._statuses.cut_off()
        await self._server.stop(grace=LAST_CALLS_S)
        if refusing is not None:
            await refusing

    async def _drain(
        self, drained: Callable[[], Awaitable[object]], finish_streams: Callable[[], Awaitable[object]]
    ) -> None:
        """Waits until no request is live and streams have written the last outputs, at most shutdown_timeout s; if
        they have not, LAST_CALLS_S more for outputs; and at most LAST_CALLS_S for other calls."""
        try:
            async with asyncio.timeout(self.shutdown_timeout):
                await drained()
                await finish_streams()
        except TimeoutError:
            logger.warning(
                "requests still run, or their outputs are unread, after %g s (--shutdown-timeout); they are cut off, "
                "or continue elsewhere",
                self.shutdown_timeout,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_CALLS_S):
                    await finish_streams()
        await self._statuses.ended(LAST_CALLS_S)


async def start(servers: Sequence[Server]) -> None:
    """Starts all servers, or none. Raises StartupError."""
    try:
        for server in servers:
            await server.start()
    except StartupError:
        await asyncio.gather(*(server.stop() for server in servers))  # otherwise gRPC would print a traceback
        raise


async def wait_for_signal() -> bool:
    """Waits for the first SIGTERM or SIGINT, and returns whether running requests may finish, as after SIGTERM.

    After Ctrl-C, a user waits for the end. A second signal ends the process at once.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Future[bool] = loop.create_future()

    def handle(number: signal.Signals) -> None:
        if not received.done():
            received.set_result(number == signal.SIGTERM)
            return
        # The default action of the signal prints no traceback.
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
    return await received


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for them; their own errors surface."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


def run(main: Awaitable[None], hang_timeout: float = 0.0) -> None:
    """Runs a service's main coroutine on uvloop. hang_timeout: seconds of a blocked loop that end the process; 0:
    never."""

    async def _run() -> None:
        await watched(main, hang_timeout)

    # Imported objects stay: searching them for garbage would stop every request for up to a tenth of a second.
    gc.freeze()
    uvloop.run(_run())
