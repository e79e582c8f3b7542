"""A server for `HF_ENDPOINT` with as much of the Hub's protocol as the download of a repository needs."""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


def etag(content: bytes, *, large: bool) -> str:
    """The name of the content: SHA-256 of what lies in LFS, else Git's SHA-1."""
    if large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_LARGE = (".safetensors", ".gguf")


@contextmanager
def hub(repository: str, files: dict[str, bytes], revisions: Sequence[str] = ("main",)) -> Iterator[str]:
    """Serves one repository; weights are large files. Yields its URL. Any other repository is private, or absent."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            asked = path.removeprefix(f"/api/models/{repository}/revision/")
            if repository not in path:
                self._refuse(401, "RepoNotFound")
            elif asked != path and asked not in (*revisions, COMMIT):
                self._refuse(404, "RevisionNotFound")
            elif path.startswith(f"/api/models/{repository}/tree/"):
                self._send(json.dumps([_entry(name, content) for name, content in files.items()]).encode(), {}, body)
            elif path.startswith(f"/api/models/{repository}"):
                siblings = [{"rfilename": name} for name in files]
                self._send(json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode(), {}, body)
            elif path.startswith(f"/{repository}/resolve/") and (name := path.split("/", 5)[-1]) in files:
                tag = etag(files[name], large=name.endswith(_LARGE))
                self._send(files[name], {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body)
            else:
                self.send_error(404)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            for name, value in (("X-Error-Code", code), ("Content-Length", "0")):
                self.send_header(name, value)
            self.end_headers()

        def _send(self, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _entry(name: str, content: bytes) -> dict[str, object]:
    large = name.endswith(_LARGE)
    entry: dict[str, object] = {
        "type": "file",
        "path": name,
        "size": len(content),
        "oid": etag(content, large=False),
    }
    if large:
        entry["lfs"] = {"oid": etag(content, large=True), "size": len(content), "pointerSize": 130}
    return entry
