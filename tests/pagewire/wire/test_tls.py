"""Certificates: which files do, when they are read again, and which clients a gRPC server with them accepts."""

import asyncio
import logging
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.client import Client
from pagewire.config import TlsConfig
from pagewire.errors import StartupError
from pagewire.stack.address import unanswered
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire.wire import health, rpc, secure_rpc, tls
from pagewire.wire.rpc import RpcError
from pagewire.wire.secure_rpc import RenewedChannel, ServiceTls, log_refusals
from pagewire.wire.tls import Certificates, Files
from tests.makers.certificates import Authority, Issued, openssl

SERVICE = "pagewire.v1.InferenceService"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def ca(directory: Path) -> Authority:
    return Authority(directory)


@pytest.fixture(scope="module")
def issued(ca: Authority) -> Issued:
    return ca.issue("service")


@pytest.fixture(scope="module")
def stranger(directory: Path) -> Issued:
    """A certificate of another CA."""
    return Authority(directory, "other-ca").issue("stranger")


def copy(issued: Issued, directory: Path) -> Issued:
    """Files that a test may change."""
    paths = (issued.certfile, issued.keyfile, issued.ca_certs)
    return Issued(*(Path(shutil.copy(path, directory)) for path in paths))


def renew(files: Issued, by: Issued) -> None:
    """Replaces each file at once, as tools that renew certificates do."""
    for old, new in ((files.keyfile, by.keyfile), (files.certfile, by.certfile), (files.ca_certs, by.ca_certs)):
        copied = Path(shutil.copy(new, old.with_suffix(".new")))
        copied.replace(old)


class _Models(inference_pb2_grpc.InferenceServiceServicer):
    """Returns the common name of the client's certificate as the name of the model."""

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        names = context.auth_context().get("x509_common_name", [b"nobody"])
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id=names[0].decode())])


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials | None) -> AsyncIterator[str]:
    """The address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"localhost:{sock.getsockname()[1]}"
    server = rpc.Server([address], shutdown_timeout=0, credentials=credentials)
    server.add(_Models(), inference_pb2_grpc.add_InferenceServiceServicer_to_server, SERVICE)
    await server.start()
    await server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop()


def of_service(issued: Issued, *links: str, cert_reqs: int = 0) -> ServiceTls:
    return ServiceTls(TlsConfig(**issued.flags, ssl_cert_reqs=cert_reqs), links)


async def asked(address: str, **files: str) -> str:
    """Returns the common name by which the server knows the client."""
    async with Client(address, **files) as client:
        return (await client.models())[0].id


async def serial(address: str) -> str:
    """Returns the serial number of the certificate that the server shows."""
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


# Files and flags.


def test_wrong_files_are_named_with_their_remedy(directory: Path, ca: Authority, issued: Issued, stranger: Issued):
    expired = ca.issue("expired", days=-1)
    encrypted = directory / "encrypted.key"
    openssl("pkey", "-in", issued.keyfile, "-aes256", "-passout", "pass:x", "-out", encrypted)
    damaged = directory / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    certfile, keyfile = str(issued.certfile), str(issued.keyfile)
    for files, message in (
        (Files(certfile="/no/such.pem", keyfile=keyfile), "--ssl-certfile /no/such.pem cannot be read: No such file"),
        (Files(certfile=certfile, keyfile="/no/such.key"), "/no/such.key cannot be read"),
        (Files(certfile=certfile), "has no private key in PEM"),
        (Files(certfile=keyfile, keyfile=keyfile), "has no certificate in PEM"),
        (Files(certfile=certfile, keyfile=str(stranger.keyfile)), "the key belongs to another certificate"),
        (Files(certfile=certfile, keyfile=str(encrypted)), "is encrypted"),
        (Files(certfile=str(damaged), keyfile=keyfile), "cannot be used"),
        (Files(certfile=certfile, keyfile=keyfile, ca_certs=str(damaged)), "--ssl-ca-certs"),
        (expired.files, "certificate has expired; renew it"),
    ):
        with pytest.raises(StartupError) as caught:
            Certificates(files, cert_reqs=2)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_certificate_that_other_services_would_not_take_is_refused_at_the_start(
    ca: Authority, issued: Issued, stranger: Issued
):
    of_another_ca = Issued(stranger.certfile, stranger.keyfile, issued.ca_certs)
    for_servers = ca.issue("server", purposes="serverAuth")
    for wrong, cause in ((of_another_ca, "unable to get"), (for_servers, "purpose")):
        of_service(wrong, "unix:/s.sock")  # is served to clients alone
        with pytest.raises(StartupError, match=cause):
            of_service(wrong, "localhost:1")


@pytest.mark.parametrize(
    "flags", [{"ssl_keyfile": "k"}, {"ssl_ca_certs": "c"}, {"ssl_cert_reqs": 2}], ids=lambda flags: next(iter(flags))
)
def test_flags_that_mean_nothing_alone_are_refused(flags: dict[str, str | int]):
    with pytest.raises(StartupError, match="needs --ssl-certfile: set both"):
        ServiceTls(TlsConfig(**flags))  # type: ignore[arg-type]


def test_certificates_of_clients_need_cas(issued: Issued):
    with pytest.raises(StartupError, match="set --ssl-ca-certs, too"):
        ServiceTls(TlsConfig(ssl_certfile=str(issued.certfile), ssl_keyfile=str(issued.keyfile), ssl_cert_reqs=2))


def test_links_without_cas_are_plain_and_the_log_says_so(issued: Issued, caplog: pytest.LogCaptureFixture):
    ServiceTls(TlsConfig(ssl_certfile=str(issued.certfile), ssl_keyfile=str(issued.keyfile)), ["tokenizer:50051"])
    assert "no TLS at tokenizer:50051: TLS between services also needs --ssl-ca-certs" in caplog.text


# Which clients are accepted.


async def test_clients_check_the_server(issued: Issued, stranger: Issued):
    async with serving(of_service(issued).of_clients()) as address:
        assert await asked(f"grpcs://{address}", ssl_ca_certs=str(issued.ca_certs)) == "nobody"
        for files in ({"ssl_ca_certs": str(stranger.ca_certs)}, {}):
            with pytest.raises(RpcError) as caught:
                await asked(f"grpcs://{address}", **files)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            reason = await asyncio.to_thread(unanswered, f"grpcs://{address}", caught.value.message)
            assert "its CA is not trusted here" in reason


async def test_clients_find_their_files_in_the_environment(issued: Issued, monkeypatch: pytest.MonkeyPatch):
    for name, path in issued.flags.items():
        monkeypatch.setenv(f"PAGEWIRE_{name.upper()}", path)
    async with serving(of_service(issued, cert_reqs=2).of_clients()) as address:
        assert await asked(f"grpcs://{address}") == "service"


async def test_a_server_that_wants_certificates_takes_none_but_its_cas(issued: Issued, stranger: Issued):
    async with serving(of_service(issued, cert_reqs=2).of_clients()) as address:
        assert await asked(address, **issued.flags) == "service"
        for files in ({}, {"ssl_certfile": str(stranger.certfile), "ssl_keyfile": str(stranger.keyfile)}):
            with pytest.raises(RpcError) as caught:
                await asked(address, ssl_ca_certs=str(issued.ca_certs), **files)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            reason = await asyncio.to_thread(unanswered, f"grpcs://{address}", caught.value.message)
            assert "certificate" in reason


async def test_services_always_want_certificates_of_each_other(issued: Issued, stranger: Issued):
    async with serving(of_service(issued, "localhost:1").of_services()) as address:
        async with of_service(issued, address).channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert [model.id for model in models] == ["service"]
        with pytest.raises(RpcError):
            await asked(address, ssl_ca_certs=str(issued.ca_certs))
        with pytest.raises(RpcError):
            await asked(address, **stranger.flags | {"ssl_ca_certs": str(issued.ca_certs)})


async def test_a_service_that_is_refused_says_why_once(
    issued: Issued, stranger: Issued, caplog: pytest.LogCaptureFixture
):
    """The calls of such a service wait for a connection, and would for ever."""
    files = Files(certfile=str(stranger.certfile), keyfile=str(stranger.keyfile), ca_certs=str(issued.ca_certs))
    async with (
        serving(of_service(issued, "localhost:1").of_services()) as refusing,
        serving(None) as plain,
        RenewedChannel(refusing, Certificates(files, is_client=True)) as refused,
        RenewedChannel(plain, Certificates(issued.files)) as unanswered,
        rpc.channel(refusing) as without_tls,
        rpc.channel(plain) as connected,
    ):
        await connected.channel_ready()
        channels = {refused: refusing, unanswered: plain, without_tls: refusing, connected: plain}
        logging_tasks = [asyncio.create_task(log_refusals(*pair, 0.05)) for pair in channels.items()]
        async with asyncio.timeout(10):
            while len(caplog.messages) < 3:  # noqa: ASYNC110 - what is logged
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
    assert caplog.text.count(f"no connection to {refusing}: it uses TLS and ends the connection") == 2
    assert caplog.text.count(f"no connection to {plain}: it does not use TLS") == 1
    async with asyncio.timeout(10):
        await asyncio.gather(*logging_tasks)  # as the channels are closed


async def test_a_client_without_tls_is_reported(issued: Issued):
    async with serving(of_service(issued).of_clients()) as address:
        with pytest.raises(RpcError) as caught:
            await asked(address)
        assert f"{address} answers with TLS: use grpcs://{address}" in await asyncio.to_thread(
            unanswered, address, caught.value.message
        )
    async with serving(None) as address:
        with pytest.raises(RpcError) as caught:
            await asked(f"grpcs://{address}", ssl_ca_certs=str(issued.ca_certs))
        reason = await asyncio.to_thread(unanswered, f"grpcs://{address}", caught.value.message)
        assert f"grpcs://{address}: it does not use TLS" in reason


async def test_the_health_command_shows_the_certificate_of_its_service(
    issued: Issued, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A container's check asks localhost, whatever name the certificate is for."""
    elsewhere = Authority(issued.certfile.parent, "line-ca").issue("elsewhere", "DNS:tokenizer.line")
    async with serving(of_service(elsewhere, "tokenizer:1").of_services()) as address:
        assert await asyncio.to_thread(health.main, [address, SERVICE]) == 1
        for name, path in elsewhere.flags.items():
            monkeypatch.setenv(f"PAGEWIRE_{name.upper()}", path)
        assert await asyncio.to_thread(health.main, [address, SERVICE]) == 0, capsys.readouterr().err


# Files that change.


@pytest.fixture
def _always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "CHECK_INTERVAL_S", 0.0)


@pytest.mark.usefixtures("_always_checked")
async def test_certificates_are_read_again(tmp_path: Path, ca: Authority, issued: Issued, stranger: Issued, caplog):
    """Both the server's certificate and the CAs of its clients are read again; open connections go on."""
    files = copy(issued, tmp_path)
    credentials = of_service(files, cert_reqs=2).of_clients()
    async with serving(credentials) as address, Client(address, **issued.flags) as before:
        assert (await before.models())[0].id == "service"
        first = await serial(address)
        with caplog.at_level(logging.INFO):
            renew(files, ca.issue("renewed"))
            second = await serial(address)
        assert second != first
        assert "certificates read again" in caplog.text
        renew(files, stranger)
        assert await serial(address) not in (first, second)
        assert await asked(address, **stranger.flags) == "stranger"
        with pytest.raises(RpcError):
            await asked(address, **issued.flags | {"ssl_ca_certs": str(stranger.ca_certs)})
        assert (await before.models())[0].id == "service"


@pytest.mark.usefixtures("_always_checked")
async def test_files_that_do_not_do_change_nothing_and_the_log_says_so_once(
    tmp_path: Path, issued: Issued, stranger: Issued, caplog: pytest.LogCaptureFixture
):
    files = copy(issued, tmp_path)
    async with serving(of_service(files).of_clients()) as address:
        first = await serial(address)
        shutil.copy(stranger.keyfile, files.keyfile)
        for _ in range(3):
            assert await serial(address) == first
        assert caplog.text.count("the key belongs to another certificate") == 1
        assert "the previous certificates remain in use until this is fixed" in caplog.text
        files.keyfile.unlink()
        assert await serial(address) == first
        renew(files, stranger)
        assert await serial(address) != first


@pytest.mark.usefixtures("_always_checked")
async def test_the_next_call_shows_the_certificate_of_then(tmp_path: Path, ca: Authority, issued: Issued):
    """Calls under way on the old connection go on."""
    files = copy(issued, tmp_path)
    async with serving(of_service(issued, "localhost:1").of_services()) as address:
        certificates = Certificates(files.files, is_client=True)
        async with RenewedChannel(address, certificates) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0].id == "service"
            renew(files, ca.issue("renewed-client"))
            assert (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0].id == "renewed-client"
            assert not watch.done()
            watch.cancel()
    assert secure_rpc.NO_TLS.of_clients() is None
