"""TLS for gRPC: what a service's servers show and want to see, and channels that have it.

Unix sockets never have TLS: only this user can open them.
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
from pagewire.wire.discovery import Listed
from pagewire.wire.tls import GRPC_WITH_TLS, NO_FILES, Certificates, Files, Loaded, certificates_of, why_unavailable

logger = logging.getLogger(__name__)

# Calls on a channel of earlier certificates may go on for so long: a stream between services never ends by itself.
_CALLS_MAY_LAST_S = 10 * 365 * 86400.0


class ServiceTls:
    """Of one process: what the flags say of its servers, and of its channels to other services.

    With a certificate, what clients reach has TLS. With CAs, too, services show each other certificates of these.
    """

    def __init__(self, config: TlsConfig, links: Sequence[str] = ()) -> None:
        """links: addresses at which this process serves other services, or finds them. Raises StartupError."""
        over_tcp = [address for address in links if not address.startswith("unix:")]
        self._telling: set[asyncio.Task[None]] = set()
        self.wants_certificates = config.ssl_cert_reqs == 2  # of clients
        self._has_secure_links = bool(over_tcp and config.ssl_ca_certs)
        self.certificates = certificates_of(config, between_services=self._has_secure_links)
        if self.certificates is not None and over_tcp and not self._has_secure_links:
            logger.warning("no TLS at %s: between services it takes --ssl-ca-certs", ", ".join(over_tcp))

    def of_clients(self) -> grpc.ServerCredentials | None:
        """For the addresses that clients reach."""
        if self.certificates is None:
            return None
        return _server_credentials(self.certificates, wants_certificate=self.wants_certificates)

    def of_services(self) -> grpc.ServerCredentials | None:
        """For the addresses that only services reach: whoever does is believed, so he has to show a certificate."""
        if self.certificates is None or not self._has_secure_links:
            return None
        return _server_credentials(self.certificates, wants_certificate=True)

    def channel(self, address: str, host: str = "") -> grpc.aio.Channel:
        """To another service. host: whose certificate it shows; "": the address's. The log says why no connection comes
        about, if that is TLS."""
        if address.startswith("unix:"):
            return rpc.channel(address)
        if self.certificates is not None and self._has_secure_links:
            channel: grpc.aio.Channel = RenewedChannel(address, self.certificates, host)
        else:
            channel = rpc.channel(address)
        telling = asyncio.create_task(log_refusals(channel, address))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        return channel

    def listed_channel(self, listed: Listed) -> grpc.aio.Channel:
        """To a service that was found; who was found by name has to show a certificate of that name."""
        return self.channel(listed.address, listed.host)


NO_TLS = ServiceTls(TlsConfig())


def client_channel(address: str, files: Files) -> grpc.aio.Channel:
    """To a public port: "grpcs://host:port" or any files mean TLS, with $PAGEWIRE_SSL_CA_CERTS and its siblings for
    files that are not given. Raises StartupError for files that do not do."""
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
    """Without CAs, those that gRPC knows count."""
    return grpc.ssl_channel_credentials(loaded.ca_certs, loaded.key, loaded.certificate)


async def log_refusals(channel: grpc.aio.Channel, address: str, interval: float = 5.0) -> None:
    """Logs what is wrong with TLS while no connection to a service comes about, once for each reason: calls just wait
    for one. Runs until the channel is closed. interval: seconds."""
    health, told, last = health_pb2_grpc.HealthStub(channel), "", ""
    while True:
        await asyncio.sleep(interval)
        try:
            if channel.get_state() is grpc.ChannelConnectivity.READY:
                told = last = ""
                continue
            await health.Check(health_pb2.HealthCheckRequest(), timeout=interval)
        except grpc.aio.UsageError:  # closed
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return  # closed while it asked
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                continue
            reason = await asyncio.to_thread(why_unavailable, address, str(error.details()))
            # Seen once, it may be a service that has just come up.
            if reason and reason == last and reason != told:
                logger.error("no connection to %s: %s", address, reason)
                told = reason
            last = reason


def _server_credentials(certificates: Certificates, *, wants_certificate: bool) -> grpc.ServerCredentials:
    told: Loaded | None = None

    def changed() -> Any:
        """Asked for every connection; None: as before."""
        nonlocal told
        loaded = certificates.current()
        if loaded is told:
            return None
        told = loaded
        # Without being asked for a certificate, a client is not told of CAs.
        roots = loaded.ca_certs if wants_certificate else None
        return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)], roots)

    return grpc.dynamic_ssl_server_credentials(changed(), changed, wants_certificate)


class RenewedChannel(grpc.aio.Channel):
    """A channel whose next call shows the certificate of then; gRPC's own show the one that they were made with."""

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
