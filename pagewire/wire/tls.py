"""Certificates: the contents of their files, reading them again after a change, and TLS of plain sockets.

`secure_rpc.py` has TLS for gRPC; docs/security.md says which side sends and which side checks a certificate.
"""

import logging
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.config import TlsConfig
from pagewire.errors import StartupError

logger = logging.getLogger(__name__)

GRPC_WITH_TLS = "grpcs://"  # begins an address with TLS
CHECK_INTERVAL_S = 1.0
_CONNECT_TIMEOUT_S = 4.0
# Words in errors of OpenSSL and BoringSSL -> the cause and the remedy.
_FAILURES = {
    "WRONG_VERSION_NUMBER": "it does not use TLS",
    "CERTIFICATE_VERIFY_FAILED": "its certificate has expired, or its CA is not trusted here: set --ssl-ca-certs to"
    " its CA",
    "ostname": "its certificate is for another name: use that name, or get a certificate for this name",
    "CERTIFICATE_REQUIRED": "it requires a certificate of its CA: set --ssl-certfile and --ssl-keyfile",
    "UNKNOWN_CA": "it does not trust the CA of this certificate",
}
_Version = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, kw_only=True)
class Files:
    """Paths of PEM files. Without a keyfile, the key is in certfile."""

    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None

    @property
    def key(self) -> str | None:
        return self.keyfile or self.certfile


NO_FILES = Files()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The contents of the files at one time; None for a file that is not configured.

    context: for a server without client certificates. names: those in the certificate. ends: the end of its validity.
    """

    certificate: bytes | None = None
    key: bytes | None = None
    ca_certs: bytes | None = None
    context: ssl.SSLContext | None = None
    names: tuple[str, ...] = ()
    ends: str = ""


class Certificates:
    """A certificate with its key, and CAs, which are read again when a file changes. Any thread may use it."""

    def __init__(
        self,
        files: Files,
        *,
        is_client: bool = False,
        between_services: bool = False,
        cert_reqs: int = 0,
        check_interval: float | None = None,
    ) -> None:
        """is_client: the certificate is sent to servers only. between_services: it is also sent to servers, and must be
        one of the CAs. cert_reqs: for the context. check_interval: seconds (default: CHECK_INTERVAL_S).

        Raises StartupError for files that cannot be used.
        """
        self.files = files
        self._is_client = is_client
        self._between_services = between_services
        self._cert_reqs = cert_reqs
        self._check_interval = CHECK_INTERVAL_S if check_interval is None else check_interval
        self._lock = threading.Lock()
        self._version = self._find_version()
        try:
            self._loaded = self._load()
        except ValueError as error:
            raise StartupError(str(error)) from error
        self._checked = time.monotonic()

    def current(self) -> Loaded:
        """Returns the current contents: the same object while nothing changes. Unusable files are logged once."""
        with self._lock:
            now = time.monotonic()
            if now - self._checked >= self._check_interval:
                self._checked = now
                self._renew()
            return self._loaded

    def _renew(self) -> None:
        before, self._version = self._version, self._find_version()
        if self._version == before:
            return
        try:
            self._loaded = self._load()
            logger.info("certificates read again: %s, valid until %s", self.files.certfile, self._loaded.ends)
        except ValueError as error:
            logger.error("%s; the previous certificates remain in use until this is fixed", error)

    def _find_version(self) -> _Version:
        paths = dict.fromkeys(filter(None, (self.files.certfile, self.files.key, self.files.ca_certs)))
        return tuple(map(_version, paths))

    def _load(self) -> Loaded:
        """Reads the files. Raises ValueError naming the file and the cause."""
        files = self.files
        ca_certs = _read(files.ca_certs, b"CERTIFICATE-----", "--ssl-ca-certs", "certificate")
        if files.certfile is None:
            return Loaded(ca_certs=ca_certs)
        certificate = _read(files.certfile, b"CERTIFICATE-----", "--ssl-certfile", "certificate")
        flag = "--ssl-keyfile" if files.keyfile else "without --ssl-keyfile, --ssl-certfile"
        key = _read(files.key, b"PRIVATE KEY-----", flag, "private key")
        shown = _check_own(files, files.certfile, as_server=not self._is_client, as_client=self._is_client)
        if self._between_services:
            _check_own(files, files.ca_certs, as_server=True, as_client=True)
        return Loaded(
            certificate=certificate,
            key=key,
            ca_certs=ca_certs,
            context=self._server_context(),
            names=tuple(value for _, value in shown.get("subjectAltName", ())),
            ends=shown["notAfter"],
        )

    def _server_context(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER, self.files)
        context.set_alpn_protocols(["http/1.1"])
        if self._cert_reqs:
            # The gateway refuses clients without a certificate itself, so that it can answer probes, which have none.
            context.verify_mode = ssl.CERT_OPTIONAL
            _trust(context, self.files.ca_certs)
        return context


def certificates_of(config: TlsConfig, *, between_services: bool = False) -> Certificates | None:
    """Returns the certificates of a service; None if it serves without TLS. Raises StartupError."""
    if config.ssl_certfile is None:
        for flag, value in (
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-ca-certs", config.ssl_ca_certs),
            ("--ssl-cert-reqs", config.ssl_cert_reqs),
        ):
            if value:
                raise StartupError(f"{flag} needs --ssl-certfile: set both")
        return None
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise StartupError("--ssl-cert-reqs needs the CAs of clients' certificates: set --ssl-ca-certs, too")
    files = Files(certfile=config.ssl_certfile, keyfile=config.ssl_keyfile, ca_certs=config.ssl_ca_certs)
    return Certificates(files, between_services=between_services, cert_reqs=config.ssl_cert_reqs)


def client_context(files: Files, *, checks_server: bool = True) -> ssl.SSLContext:
    """Returns a context for clients. Without ca_certs, it trusts the CAs of the system. Raises StartupError."""
    try:
        _read(files.ca_certs, b"CERTIFICATE-----", "--ssl-ca-certs", "certificate")
        context = _context(ssl.PROTOCOL_TLS_CLIENT, files)
        if not checks_server:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        elif files.ca_certs is None:
            context.load_default_certs()
        else:
            _trust(context, files.ca_certs)
    except ValueError as error:
        raise StartupError(str(error)) from error
    return context


def speaks_tls(host: str, port: int) -> bool:
    """Returns whether the server at this address uses TLS, with any certificate."""
    context = client_context(NO_FILES, checks_server=False)
    try:
        with (
            socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as sock,
            context.wrap_socket(sock, server_hostname=host),
        ):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # for instance because the server requires a certificate
    except (OSError, ValueError):
        return False


def failed_handshake(message: str) -> str:
    """Returns the cause and the remedy for a message of gRPC or OpenSSL about TLS; "" for other messages."""
    return next((cause for mark, cause in _FAILURES.items() if mark in message), "")


def why_unavailable(address: str, message: str) -> str:
    """Returns the error of TLS after a call to "host:port" was UNAVAILABLE; "" if TLS is not the cause."""
    host, _, port = address.rpartition(":")
    if cause := failed_handshake(message):
        return cause
    if port.isdecimal() and speaks_tls(host.strip("[]"), int(port)):
        return (
            "it uses TLS and ends the connection: it may require a certificate of its own CA (--ssl-certfile,"
            " --ssl-keyfile and --ssl-ca-certs)"
        )
    return ""


def _read(path: str | None, mark: bytes, flag: str, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror or error}") from error
    if mark not in content:
        raise ValueError(
            f"{flag} {path} has no {what} in PEM (-----BEGIN ...): convert it with openssl, or use another file"
        )
    return content


def _version(path: str) -> tuple[int, int, int] | None:
    """Returns None if there is no such file."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _context(protocol: int, files: Files) -> ssl.SSLContext:
    """Returns a context with the certificate. Raises ValueError for a key of another certificate."""
    context = ssl.SSLContext(protocol)
    if files.certfile is None:
        return context

    def no_password() -> str:
        raise ValueError(f"--ssl-keyfile {files.key} is encrypted: remove the password with `openssl pkey`")

    try:
        context.load_cert_chain(files.certfile, files.key, no_password)
    except ssl.SSLError as error:
        pair = f"--ssl-certfile {files.certfile} and --ssl-keyfile {files.key}"
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"{pair}: the key belongs to another certificate; use the key of this certificate"
            ) from error
        raise ValueError(f"{pair} cannot be used ({error.reason or 'damaged'}): create them again") from error
    except OSError as error:
        raise ValueError(f"--ssl-certfile {files.certfile} cannot be read: {error.strerror or error}") from error
    return context


def _trust(context: ssl.SSLContext, ca_certs: str | None) -> None:
    try:
        context.load_verify_locations(ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"--ssl-ca-certs {ca_certs} cannot be used: {error}") from error


def _check_own(files: Files, trusted: str | None, *, as_server: bool, as_client: bool) -> dict[str, Any]:
    """Checks the certificate by a handshake in memory with a side that trusts `trusted`.

    Returns the certificate like ssl.SSLSocket.getpeercert(). Raises ValueError, for instance if it has expired.
    """
    server, client = _context(ssl.PROTOCOL_TLS_SERVER, files), _context(ssl.PROTOCOL_TLS_CLIENT, files)
    client.check_hostname = False
    for context, checks in ((client, as_server), (server, as_client)):
        context.verify_mode = ssl.CERT_REQUIRED if checks else ssl.CERT_NONE
        # A certificate may be trusted itself, without its issuer.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _trust(context, trusted)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    asked = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in 2 * (asking, asked):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        by = "" if trusted == files.certfile else f" for --ssl-ca-certs {trusted}"
        raise ValueError(
            f"--ssl-certfile {files.certfile} is not valid{by}: {error.verify_message}; renew it, or use another"
        ) from error
    return (asking if as_server else asked).getpeercert() or {}
