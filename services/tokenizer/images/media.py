"""Reads the bytes behind an image's URL: data URIs, and the files and hosts that the operator allows.

Requests name URLs, so a client could make this service read files and call hosts that only the service can reach. Hence
nothing is fetched unless flags allow it, addresses are checked after names are resolved, the connection goes to the
checked address, and each redirect is checked like a new URL.
"""

import asyncio
import base64
import binascii
import ipaddress
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import httpx

MAX_REDIRECTS = 5
MAX_FETCHES = 16  # at once; each may take --max-image-bytes of memory
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
_RELAYS_OF_6TO4 = ipaddress.IPv4Network("192.88.99.0/24")  # deprecated (RFC 7526), which Python counts as global
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")  # RFC 4291: all allotted addresses
# Characters of a URL that an error message quotes.
_SHOWN = 100


class MediaError(ValueError):
    """The URL cannot be read; the message gives the client the reason."""


class MediaReader:
    """Reads URLs, within the limits that the operator has set."""

    def __init__(
        self, *, allowed_domains: tuple[str, ...], allowed_path: str | None, max_bytes: int, timeout: float
    ) -> None:
        """allowed_domains: hosts; "*" = all with public addresses. allowed_path: the directory for file: URLs.

        Raises ValueError if allowed_path is no directory.
        """
        self._domains = frozenset(domain.lower().rstrip(".") for domain in allowed_domains)
        self._path = None if allowed_path is None else Path(allowed_path).resolve()
        if self._path is not None and not self._path.is_dir():
            raise ValueError(f"--allowed-local-media-path {allowed_path} is not a directory")
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        # Separate threads: a lookup continues after its timeout, and other work must not wait for it.
        self._lookups = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="lookup")

    async def read(self, url: str) -> bytes:
        """Raises MediaError."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(self._decode, url)  # may be megabytes
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, url)
        if scheme in ("http", "https"):
            try:
                async with asyncio.timeout(self._timeout), self._fetches:
                    return await self._fetch(url)
            except TimeoutError as error:
                raise MediaError(f"{_shown(url)} did not arrive within {self._timeout:g} seconds") from error
        raise MediaError(f"{_shown(url)} is not a data:, http:, https: or file: URL")

    def _decode(self, url: str) -> bytes:
        header, comma, content = url.partition(",")
        if not comma:
            raise MediaError("the data URI has no comma before its data")
        if len(content) > self._max_bytes * 3:  # percent-encoded at most
            raise self._too_large("the data URI")
        if header.lower().endswith(";base64"):
            try:
                data = base64.b64decode(unquote_to_bytes(content), validate=True)
            except binascii.Error as error:
                raise MediaError(f"the data URI is not valid base64: {error}") from error
        else:
            data = unquote_to_bytes(content)
        if len(data) > self._max_bytes:
            raise self._too_large("the data URI")
        return data

    def _read_file(self, url: str) -> bytes:
        if self._path is None:
            raise MediaError("file: URLs are not read; start the server with --allowed-local-media-path")
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise MediaError(f"{_shown(url)} is not a URL: {error}") from error
        if parts.netloc not in ("", "localhost"):
            raise MediaError(f"{_shown(url)} names another host; use file:///path")
        named = Path(unquote_to_bytes(parts.path).decode(errors="replace").replace("\0", ""))
        try:
            path = named.resolve()
            if not path.is_relative_to(self._path):
                raise MediaError(f"{_shown(url)} is outside --allowed-local-media-path")
            if not path.is_file():
                raise MediaError(f"{_shown(url)} is no file")
            with path.open("rb") as file:
                data = file.read(self._max_bytes + 1)
        except OSError as error:  # too long a name, no permission
            raise MediaError(f"{_shown(url)} cannot be read: {error.strerror}") from error
        except RuntimeError as error:
            raise MediaError(f"{_shown(url)} cannot be read: links lead in a circle") from error
        if len(data) > self._max_bytes:
            raise self._too_large(_shown(url))
        return data

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The settings of TLS. Made once: it takes 20 ms, during which no request gets tokens."""
        return httpx.create_ssl_context(trust_env=False)

    async def _fetch(self, url: str) -> bytes:
        # No proxies from the environment: a proxy would resolve names again.
        async with httpx.AsyncClient(trust_env=False, timeout=self._timeout, verify=self._tls) as client:
            for _ in range(1 + MAX_REDIRECTS):
                found = await self._fetch_one(client, url)
                if isinstance(found, bytes):
                    return found
                url = found
        raise MediaError(f"{_shown(url)}: more than {MAX_REDIRECTS} redirects")

    async def _fetch_one(self, client: httpx.AsyncClient, url: str) -> bytes | str:
        """Returns the content, or the URL of a redirect."""
        try:
            target = httpx.URL(url)
            address = await self._checked_address(target)
            request = client.build_request(
                "GET",
                target.copy_with(host=address),
                headers={"Host": target.netloc.decode("ascii"), "Accept": "image/*", "Accept-Encoding": "identity"},
                extensions={"sni_hostname": target.host},
            )
            response = await client.send(request, stream=True)
            try:
                if response.status_code in _REDIRECTS and "location" in response.headers:
                    return str(target.join(response.headers["location"]))
                if response.status_code != 200:
                    raise MediaError(f"{_shown(url)} answered {response.status_code}")
                return await self._content(response, url)
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise MediaError(f"{_shown(url)} cannot be fetched: {error or type(error).__name__}") from error

    async def _content(self, response: httpx.Response, url: str) -> bytes:
        """Reads the content as it was sent: decompressed, it could become gigabytes before its size is known."""
        if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
            raise MediaError(f"{_shown(url)} arrived with Content-Encoding {_shown(encoding)}, which was not requested")
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            if len(data) > self._max_bytes:
                raise self._too_large(_shown(url))
        return bytes(data)

    async def _checked_address(self, url: httpx.URL) -> str:
        """Returns the address of the URL's host, if it may be called. A host that the flag names may be private."""
        host = url.host.lower().rstrip(".")
        if url.scheme not in ("http", "https") or not host:
            raise MediaError(f"{_shown(str(url))} is not an http: or https: URL")
        if not self._domains:
            raise MediaError("http: and https: URLs are not fetched; start the server with --allowed-media-domains")
        is_named = host in self._domains
        if not is_named and "*" not in self._domains:
            raise MediaError(f"{host} is not among --allowed-media-domains")
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        except OSError as error:
            raise MediaError(f"{host} cannot be resolved: {error.strerror}") from error
        addresses = [str(entry[4][0]) for entry in found]
        if not is_named and not all(_is_public(address) for address in addresses):
            raise MediaError(f"{host} has an address that is not public; --allowed-media-domains can name the host")
        return addresses[0]

    def _too_large(self, what: str) -> MediaError:
        return MediaError(f"{what} has more than {self._max_bytes} bytes (--max-image-bytes)")


def _is_public(address: str) -> bool:
    """Whether an address is public. An IPv6 address that stands for an IPv4 one is judged by the latter."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not found.is_multicast and found not in _RELAYS_OF_6TO4
    if found in _NAT64:
        return _is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)))
    if found.ipv4_mapped is not None:
        return _is_public(str(found.ipv4_mapped))
    return found in _GLOBAL_UNICAST and found.is_global and not (found.sixtofour or found.teredo)


def _shown(url: str) -> str:
    return url if len(url) <= _SHOWN else f"{url[:_SHOWN]}…"
