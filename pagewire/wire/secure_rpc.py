"""TLS for gRPC: credentials of servers, and channels with TLS.

Unix sockets never use TLS: only the same user can open them.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.config import TlsConfig
from pagewire.wire import rpc
from pagewire.wire.discovery.listed import Listed
from pagewire.wire.tls import GRPC_WITH_TLS, NO_FILES, Certificates, Files, Loaded, certificates_of, why_unavailable

logger = logging.getLogger(__name__)

# How long calls may continue on a channel with earlier certificates: streams between services do not end otherwise.
_CALLS_MAY_LAST_S = 10 * 365 * 86400.0


class ServiceTls:
    """The TLS of one process, for its servers and for its channels to other services.

    With a certificate, public addresses use TLS. With CAs, services also authenticate each other by certificates.
    """

    def __init__(self, config: TlsConfig, links: Sequence[str] = ()) -> None:
        """links: addresses at which this process serves or reaches other services. Raises StartupError."""
        over_tcp = [address for address in links if not address.startswith("unix:")]
        self._logging: set[asyncio.Task[None]] = set()
        self.wants_certificates = config.ssl_cert_reqs == 2  # from clients
        self._has_secure_links = bool(over_tcp and config.ssl_ca_certs)
        self.certificates = certificates_of(config, between_services=self._has_secure_links)
        if self.certificates is not None and over_tcp and not self._has_secure_links:
            logger.warning("no TLS at %s: TLS between services also needs --ssl-ca-certs", ", ".join(over_tcp))

    def of_clients(self) -> grpc.ServerCredentials | None:
        """Returns the credentials for public addresses."""
        if self.certificates is None:
            return None
        return _server_credentials(self.certificates, wants_certificate=self.wants_certificates)

    def of_services(self) -> grpc.ServerCredentials | None:
        """Returns the credentials for addresses of services. They require certificates, because services are
        trusted."""
        if self.certificates is None or not self._has_secure_links:
            return None
        return _server_credentials(self.certificates, wants_certificate=True)

    def channel(self, address: str, host: str = "") -> grpc.aio.Channel:
        """Returns a channel to another service, and logs TLS errors of its connections.

        host: the name in the certificate; "": that of the address.
        """
        if address.startswith("unix:"):
            return rpc.channel(address)
        if self.certificates is not None and self._has_secure_links:
            channel: grpc.aio.Channel = RenewedChannel(address, self.certificates, host)
        else:
            channel = rpc.channel(address)
        logging_errors = asyncio.create_task(log_refusals(channel, address))
        self._logging.add(logging_errors)
        logging_errors.add_done_callback(self._logging.discard)
        return channel

    def listed_channel(self, listed: Listed) -> grpc.aio.Channel:
        """Returns a channel to a discovered service; one found by name needs a certificate with that name."""
        return self.channel(listed.address, listed.host)


NO_TLS = ServiceTls(TlsConfig())


def client_channel(address: str, files: Files) -> grpc.aio.Channel:
    """Returns a channel to a public port, with TLS for "grpcs://host:port" or if any files are given.

    $PAGEWIRE_SSL_CA_CERTS and its siblings are the defaults of files. Raises StartupError for unusable files.
    """
    is_secure = address.startswith(GRPC_WITH_TLS) or files != NO_FILES
    if address.startswith("unix:") or not is_secure:
        return rpc.channel(address)
    files = Files(
        certfile=files.certfile or os.environ.get("PAGEWIRE_SSL_CERTFILE"),
        keyfile=files.keyfile or os.environ.get("PAGEWIRE_SSL_KEYFILE"),
        ca_certs=files.ca_certs or os.environ.get("PAGEWIRE_SSL_CA_CERTS"),
    )
    return RenewedChannel(address.removeprefix(GRPC_WITH_TLS), Certificates(files, is_client=True))


def channel_credentials(loaded: Loaded) -> grpc.ChannelCredentials:
    """Returns credentials of a channel. Without CAs, it trusts those of gRPC."""
    return grpc.ssl_channel_credentials(loaded.ca_certs, loaded.key, loaded.certificate)


async def log_refusals(channel: grpc.aio.Channel, address: str, interval: float = 5.0) -> None:
    """Logs TLS errors while a channel cannot connect, once for each cause: calls would just wait.

    Runs until the channel is closed. interval: seconds.
    """
    health, logged, last = health_pb2_grpc.HealthStub(channel), "", ""
    while True:
        await asyncio.sleep(interval)
        try:
            if channel.get_state() is grpc.ChannelConnectivity.READY:
                logged = last = ""
                continue
            await health.Check(health_pb2.HealthCheckRequest(), timeout=interval)
        except grpc.aio.UsageError:  # closed
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return  # closed during the check
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                continue
            reason = await asyncio.to_thread(why_unavailable, address, str(error.details()))
            # A cause that occurs once may be a service that is starting.
            if reason and reason == last and reason != logged:
                logger.error("no connection to %s: %s", address, reason)
                logged = reason
            last = reason


def _server_credentials(certificates: Certificates, *, wants_certificate: bool) -> grpc.ServerCredentials:
    current: Loaded | None = None

    def changed() -> Any:
        """Returns the certificates for a new connection; None if they are unchanged."""
        nonlocal current
        loaded = certificates.current()
        if loaded is current:
            return None
        current = loaded
        # CAs are sent only to clients that need a certificate.
        roots = loaded.ca_certs if wants_certificate else None
        return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)], roots)

    return grpc.dynamic_ssl_server_credentials(changed(), changed, wants_certificate)


class RenewedChannel(grpc.aio.Channel):
    """A channel with the current certificate for each call; channels of gRPC keep the one they were made with."""

    def __init__(self, address: str, certificates: Certificates, host: str = "") -> None:
        self._address = address
        self._host = host
        self._certificates = certificates
        self._loaded = certificates.current()
        self._channel = self._open()
        self._closing: set[asyncio.Task[None]] = set()

    def _open(self) -> grpc.aio.Channel:
        return rpc.channel(self._address, channel_credentials(self._loaded), self._host)

    def _current(self) -> grpc.aio.Channel:
        loaded = self._certificates.current()
        if loaded is not self._loaded:
            closing = asyncio.create_task(self._channel.close(_CALLS_MAY_LAST_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._loaded = loaded
            self._channel = self._open()
        return self._channel

    def _method(self, kind: str, *arguments: Any, **keywords: Any) -> Callable[..., Any]:
        made: tuple[grpc.aio.Channel, Any] | None = None

        def call(*request: Any, **options: Any) -> Any:
            nonlocal made
            channel = self._current()
            if made is None or made[0] is not channel:
                made = channel, getattr(channel, kind)(*arguments, **keywords)
            return made[1](*request, **options)

        return call

    def unary_unary(self, *arguments: Any, **keywords: Any) -> Any:
        return self._method("unary_unary", *arguments, **keywords)

    def unary_stream(self, *arguments: Any, **keywords: Any) -> Any:
        return self._method("unary_stream", *arguments, **keywords)

    def stream_unary(self, *arguments: Any, **keywords: Any) -> Any:
        return self._method("stream_unary", *arguments, **keywords)

    def stream_stream(self, *arguments: Any, **keywords: Any) -> Any:
        return self._method("stream_stream", *arguments, **keywords)

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await rpc.cancel(list(self._closing))
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
