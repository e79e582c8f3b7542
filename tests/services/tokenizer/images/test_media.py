"""URLs of images: data, and the hosts and files that flags allow."""

import asyncio
import gzip
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from pagewire.services.tokenizer.images.media import MediaError, MediaReader

CONTENT = b"\x89PNG" + bytes(range(256))


def reader(*domains, path=None, max_bytes=1000, timeout=5.0):
    return MediaReader(allowed_domains=domains, allowed_path=path and str(path), max_bytes=max_bytes, timeout=timeout)


@asynccontextmanager
async def server(*answers):
    """Answers each path `/N` with answers[N], bytes of a whole response or None for silence; yields its port."""

    async def handle(stream, writer):
        head = await stream.readuntil(b"\r\n\r\n")
        answer = answers[int(head.split()[1].decode().rpartition("/")[2])]
        if answer is None:
            await asyncio.sleep(60)
        else:
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


def found(content, length=None):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (length or len(content)) + content


def redirect(location):
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


async def test_data_uris():
    assert await reader().read("data:image/png;base64,aGVsbG8=") == b"hello"
    assert await reader().read("DATA:,a%20b") == b"a b"
    assert await reader().read("data:;base64,aGVsbG8%3D") == b"hello"
    for url in ("data:image/png;base64", "data:;base64,a", "data:;base64,a b=="):
        with pytest.raises(MediaError, match="data URI"):
            await reader().read(url)
    with pytest.raises(MediaError, match="more than 10 bytes"):
        await reader(max_bytes=10).read("data:;base64," + "a" * 400)


async def test_files_only_within_the_directory(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"secret")
    (allowed / "link").symlink_to(tmp_path / "secret")
    (allowed / "circle").symlink_to(allowed / "circle")
    files = reader(path=allowed)
    assert await files.read(f"file://{allowed}/a%20b.png") == CONTENT
    refused = {
        f"file://{allowed}/../secret": "outside",
        f"file://{allowed}/%2e%2e/secret": "outside",
        f"file://{allowed}/link": "outside",
        f"file://{allowed}/none": "no file",
        f"file://{allowed}": "no file",
        f"file://other{allowed}/a.png": "another host",
        f"file://{allowed}/{'a' * 300}": "cannot be read: File name too long",
        f"file://{allowed}/circle": "cannot be read|no file",  # Python before 3.13, and since
        f"file://[{allowed}": "is not a URL",
    }
    for url, message in refused.items():
        with pytest.raises(MediaError, match=message):
            await files.read(url)
    with pytest.raises(MediaError, match="more than 10 bytes"):
        await reader(path=allowed, max_bytes=10).read(f"file://{allowed}/a%20b.png")
    with pytest.raises(MediaError, match="start the server with --allowed-local-media-path"):
        await reader().read(f"file://{allowed}/a%20b.png")
    with pytest.raises(ValueError, match="is not a directory"):
        reader(path=tmp_path / "secret")


async def test_http_only_from_hosts_that_are_allowed():
    async with server(found(CONTENT), redirect("/0"), b"HTTP/1.1 404 Nope\r\nContent-Length: 0\r\n\r\n") as port:
        named = reader("localhost", "other.example")
        assert await named.read(f"http://localhost:{port}/0") == CONTENT
        assert await named.read(f"http://LOCALHOST:{port}/1") == CONTENT
        with pytest.raises(MediaError, match="answered 404"):
            await named.read(f"http://localhost:{port}/2")
        with pytest.raises(MediaError, match=r"127\.0\.0\.1 is not among --allowed-media-domains"):
            await named.read(f"http://127.0.0.1:{port}/0")
        with pytest.raises(MediaError, match="not public"):
            await reader("*").read(f"http://localhost:{port}/0")
        private = ["127.0.0.1", "169.254.169.254", "10.0.0.1", "0.0.0.0", "100.64.0.1", "224.0.0.1", "192.88.99.1"]
        private += ["[::1]", "[::ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::127.0.0.1]", "[64:ff9b::10.0.0.1]"]
        private += ["[2002:7f00:1::]", "[fe80::1]", "[fec0::1]", "[fd00::1]", "[ff02::1]"]
        for host in private:
            with pytest.raises(MediaError, match="not public"):
                await reader("*").read(f"http://{host}:{port}/0")


async def test_redirects_are_checked_again():
    async with server(found(CONTENT), None) as port:
        away = (f"http://127.0.0.1:{port}/0", "file:///etc/passwd", "gopher://x/", "http:///")
        async with server(*map(redirect, away), redirect("/4")) as first:
            for index in range(len(away)):
                with pytest.raises(MediaError, match=r"not among|is not an http: or https: URL|cannot be fetched"):
                    await reader("localhost").read(f"http://localhost:{first}/{index}")
            with pytest.raises(MediaError, match="more than 5 redirects"):
                await reader("localhost").read(f"http://localhost:{first}/4")


async def test_size_and_time_have_bounds():
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(100_000)
    async with server(None, endless, found(b"short", 100)) as port:
        with pytest.raises(MediaError, match=r"did not arrive within 0\.2 seconds"):
            await reader("localhost", timeout=0.2).read(f"http://localhost:{port}/0")
        with pytest.raises(MediaError, match="more than 1000 bytes"):
            await reader("localhost").read(f"http://localhost:{port}/1")
        with pytest.raises(MediaError, match="cannot be fetched"):
            await reader("localhost").read(f"http://localhost:{port}/2")


async def test_lookups_without_an_answer_delay_no_other(monkeypatch):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    name_server_answers = threading.Event()

    def look_up(*args, **kwargs):
        assert name_server_answers.wait(20)
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    media = reader("host", timeout=0.1)
    try:
        results = await asyncio.gather(*(media.read("http://host/") for _ in range(4)), return_exceptions=True)
        assert all("did not arrive within" in str(error) for error in results)
        assert await asyncio.wait_for(media.read("data:,a"), 5) == b"a"
    finally:
        name_server_answers.set()


async def test_what_is_compressed_is_not_unpacked():
    """A bomb in a bomb: a few hundred bytes that become a hundred million."""
    bomb = gzip.compress(gzip.compress(bytes(100_000_000), 1))
    packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    plain = b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: %d\r\n\r\n" % len(CONTENT)
    async with server(packed + bomb, plain + CONTENT) as port:
        with pytest.raises(MediaError, match="Content-Encoding gzip, gzip, which was not requested"):
            await reader("localhost").read(f"http://localhost:{port}/0")
        assert await reader("localhost").read(f"http://localhost:{port}/1") == CONTENT


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "x.png", "", "http://", "http://[", "http://host:99999/", "javascript:1"]
)
async def test_other_urls_are_refused(url):
    with pytest.raises(MediaError):
        await reader("host").read(url)
