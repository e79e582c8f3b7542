"""A server with as much of Kubernetes' API as lists and watches EndpointSlices, over HTTPS."""

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.makers.certificates import Authority

TOKEN = "a-token"


class FakeApiServer:
    """One namespace, "inference"."""

    def __init__(self, directory: Path) -> None:
        """directory: for the service account's files, too (`account`)."""
        authority = Authority(directory)
        issued = authority.issue("api")
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(issued.certfile, issued.keyfile)
        self.account = directory / "account"
        self.account.mkdir()
        (self.account / "ca.crt").write_bytes(authority.ca_certs.read_bytes())
        (self.account / "token").write_text(TOKEN)
        (self.account / "namespace").write_text("inference\n")
        self.port = 0
        self.tokens = {TOKEN}
        self.version = 100
        self.num_lists = 0
        self.num_watching = 0
        self._oldest = 0  # events from then on are known
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._latest: dict[str, Any] = {}
        self._moved = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    # -- what happens ------------------------------------------------------------------------------------------------

    def put(self, name: str, *endpoints: dict[str, Any], service: str = "executor", **more: Any) -> None:
        """A slice is there, or is another one."""
        labels = {"kubernetes.io/service-name": service, **more.pop("labels", {})}
        kind = "MODIFIED" if name in self._slices else "ADDED"
        ports = [{"name": "grpc", "port": 50053}]
        self._slices[name] = {
            "addressType": "IPv4", "ports": ports, "endpoints": list(endpoints), **more,
            "metadata": {"name": name, "labels": labels, "resourceVersion": str(self._next_version())},
        }  # fmt: skip
        self._send(kind, self._slices[name])

    def delete(self, name: str) -> None:
        gone = self._slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self._next_version())
        self._send("DELETED", gone)

    def bookmark(self) -> None:
        self._send("BOOKMARK", {"metadata": {"resourceVersion": str(self._next_version())}})

    def fail_watches(self, code: int) -> None:
        """Ends the present watches with this code, sent as an event."""
        self._send("ERROR", {"kind": "Status", "code": code, "message": "so it is"})

    def forget(self) -> None:
        """Drops the events until now."""
        self._events.clear()
        self._oldest = self.version

    def _next_version(self) -> int:
        self.version += 1
        return self.version

    def _send(self, kind: str, one: dict[str, Any]) -> None:
        self._latest = {"type": kind, "object": json.loads(json.dumps(one))}
        if kind != "ERROR":
            self._events.append(self._latest)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    # -- the server --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Serves, at the previous port if there was one."""
        self._server = await asyncio.start_server(self._serve, "localhost", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            target = urlsplit(head.split()[1])
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            query = {name: values[0] for name, values in parse_qs(target.query).items()}
            if headers["authorization"].removeprefix("bearer ") not in self.tokens:
                self._answer(writer, 401, {"message": "Unauthorized"})
            elif target.path != "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices":
                self._answer(writer, 403, {"message": f"{target.path} is not for you"})
            elif "watch" in query:
                await self._watch(writer, query)
            else:
                self.num_lists += 1
                chosen = [one for one in self._slices.values() if _matches(one, query["labelSelector"])]
                self._answer(writer, 200, {"items": chosen, "metadata": {"resourceVersion": str(self.version)}})
            await writer.drain()
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(content)))
        writer.write(content)

    async def _watch(self, writer: asyncio.StreamWriter, query: dict[str, str]) -> None:
        seen = int(query["resourceVersion"])
        if seen < self._oldest:
            self._answer(writer, 410, {"message": "too old resource version"})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.num_watching += 1
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                while True:
                    moved = self._moved
                    news = [event for event in self._events if self._version_of(event) > seen]
                    for event in news:
                        seen = max(seen, self._version_of(event))
                        if event["type"] == "BOOKMARK" or _matches(event["object"], query["labelSelector"]):
                            line = json.dumps(event).encode() + b"\n"
                            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
                    await writer.drain()
                    await moved.wait()
                    if self._latest["type"] == "ERROR":
                        line = json.dumps(self._latest).encode() + b"\n"
                        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(line), line))
                        return
        except TimeoutError:
            writer.write(b"0\r\n\r\n")
        finally:
            self.num_watching -= 1

    def _version_of(self, event: dict[str, Any]) -> int:
        return int(event["object"]["metadata"]["resourceVersion"])


def endpoint(address: str, *, ready: bool | None = True, terminating: bool = False, pod: str = "") -> dict[str, Any]:
    """Returns an endpoint of an EndpointSlice; `ready` None leaves the condition out, `pod` is the pod's uid."""
    conditions = {"terminating": terminating} | ({} if ready is None else {"ready": ready})
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "uid": pod or address}}


def _matches(one: dict[str, Any], selector: str) -> bool:
    labels = one["metadata"]["labels"]
    return all(labels.get(name) == value for name, _, value in (term.partition("=") for term in selector.split(",")))
