"""Bodies that are long where a body can be: every list, map, text and number, by REST, gRPC, in batches and files.

What a flood does to others is measured by `watch.py`.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.wire import rpc
from tests.chaos.fuzz.grpc import methods
from tests.chaos.fuzz.http import BODIES
from tests.chaos.fuzz.line import Finding, FuzzLine, is_unreadable, refusals
from tests.chaos.fuzz.mutation import FLOATS, INTEGERS, Mutator
from tests.chaos.fuzz.places import Place, places
from tests.chaos.fuzz.watch import processes, watched

# What the whole stack may do while floods arrive. A machine of two cores computes for others, too, in that time.
MAX_STALL_S = 0.5
MAX_MEMORY_BYTES = 2 << 30  # of a service, beyond what it had
MAX_BODY_BYTES = 31 << 20
PATIENCE_S = 20.0  # of a client; what is right may take long to compute
LONG = (2_000, 30_000, 300_000, 1_000_000)
# For lines of which all services share one process, with each other and with the test.
SHORT = (2_000, 30_000)
# Replaced by an integer of so many digits that this process itself might not write it.
_LONG_INTEGER = "long integer"
_OBJECTS: tuple[Any, ...] = ({}, {"type": "text"}, {"role": "user", "content": "x"})
_WRONG: tuple[Any, ...] = (_LONG_INTEGER, [], None, True, 0.5, 1, 1.0, "", "x", *_OBJECTS)
_TEXTS = ("x", "\0", "\n", " ", "é", "漢", "\U0001f469", "<|im_end|>", "{{", "\ud83d", '"', "\\", "a b ")
_OK = (*range(200, 300), *range(400, 500), 501, 503)  # 503: there is no room for more
_PUBLIC = ("InferenceService", "SchedulerService")


@dataclass
class Flooded:
    """The routes with a body, and where each is long."""

    routes: dict[str, list[Place]]

    @classmethod
    def of(cls, document: Any) -> "Flooded":
        """Reads the document of the API, from /openapi.json."""
        definitions, routes = document["components"]["schemas"], {}
        for path, operations in document["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            if (body := content.get("application/json")) is not None and "{" not in path:
                routes[path] = places(body["schema"], definitions)
        return cls(routes)

    def draw(self, mutator: Mutator, sizes: Sequence[int]) -> tuple[str, bytes]:
        """Returns a route and a body, almost right where its beginning is known."""
        path = mutator.random.choice([path for path, found in self.routes.items() if found])
        place = mutator.random.choice(self.routes[path])
        body = place.body(value(mutator, place.kind, mutator.random.choice(sizes)))
        if isinstance(body, dict) and path in BODIES:
            body = mutator.random.choice(BODIES[path]) | body
        content = json.dumps(body, ensure_ascii=mutator.is_so(0.3)).encode("utf-8", "surrogatepass")
        content = content.replace(b'"%s"' % _LONG_INTEGER.encode(), b"7" * 4200)
        return path, content[:MAX_BODY_BYTES]


def value(mutator: Mutator, kind: str, size: int) -> Any:
    """Returns a long or extreme value. kind: as of a Place."""
    choose = mutator.random.choice
    if kind == "number":
        return choose([one for one in FLOATS if abs(one) < float("inf")])
    if kind == "integer":
        return choose((*INTEGERS, 10**300, 1.0, 0.5))
    if kind == "string":
        return choose(_TEXTS) * (size * choose((1, 10)))
    item = mutator.json_value() if mutator.is_so(0.2) else choose(_WRONG)
    if isinstance(item, list | dict) and len(str(item)) > 100:
        size = min(size, 2_000)
    return [item] * size if kind == "array" else {str(number): item for number in range(size)}


async def post(http: httpx.AsyncClient, path: str, content: bytes) -> None:
    """Sends a flood. Raises Finding."""
    shown = f"POST {path} of {len(content)} bytes, {content[:300]!r}...{content[-100:]!r}"
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await http.post(path, content=content, headers={"content-type": "application/json"})
    except TimeoutError:
        return
    except httpx.HTTPError as error:
        raise Finding(f"{shown}: {type(error).__name__}: {error}") from error
    if answer.status_code not in _OK:
        raise Finding(f"{shown}: {answer.status_code} {answer.text[:500]}")


async def post_batch(http: httpx.AsyncClient, path: str, content: bytes) -> None:
    """Has a flood run as the line of a batch. Raises Finding."""
    url = path if path in ("/v1/completions", "/v1/responses", "/v1/embeddings") else "/v1/chat/completions"
    line = b'{"custom_id": "a", "method": "POST", "url": "%s", "body": %s}\n' % (url.encode(), content)
    file = await http.post("/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"})
    if file.status_code != 200:
        return
    body = {"input_file_id": file.json()["id"], "endpoint": url, "completion_window": "24h"}
    batch = (await http.post("/v1/batches", json=body)).json()
    deadline = time.monotonic() + PATIENCE_S
    while batch.get("status") in ("validating", "in_progress", "finalizing"):
        if time.monotonic() > deadline:
            await http.post(f"/v1/batches/{batch['id']}/cancel")
            return
        await asyncio.sleep(0.1)
        batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    if batch.get("status") not in ("completed", "failed"):
        raise Finding(f"a batch of {line[:300]!r} ended so: {batch}")


async def call(
    channel: grpc.aio.Channel, mutator: Mutator, sizes: Sequence[int], service: str, *, is_public: bool = False
) -> str:
    """Sends a message that is long somewhere and returns its method. is_public: the channel reaches nothing else.
    Raises Finding."""
    every = [one for one in methods() if one.service == service and not one.descriptor.client_streaming]
    method = mutator.random.choice([one for one in every if not is_public or one.name.split("/")[0] in _PUBLIC])
    message = method.valid(mutator)
    lengthen(mutator, message, mutator.random.choice(sizes))
    stream = channel.unary_stream(method.path)(message.SerializeToString(), timeout=PATIENCE_S)
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as error:
        allowed = error.code() in refusals() or is_unreadable(error) or error.code() is grpc.StatusCode.UNAVAILABLE
        if not allowed:
            raise Finding(f"{method.name} with {str(message)[:300]}: {error.code()} {error.details()}") from error
    return method.name


def lengthen(mutator: Mutator, message: Message, size: int) -> None:
    """Makes one field long, or one in a message below it."""
    every: Any = message.DESCRIPTOR.fields
    fields: list[FieldDescriptor] = list(every)
    if not fields:
        return
    field = mutator.random.choice(fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    if field.is_repeated:
        values = getattr(message, field.name)
        if field.message_type is None:
            values.extend([mutator.scalar(field)] * size)
        else:
            part = values.add()
            mutator.message(part)
            values.extend([part] * min(size, 30_000))
    elif field.message_type is not None:
        part = getattr(message, field.name)
        part.SetInParent()
        lengthen(mutator, part, size)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING and field.type != FieldDescriptor.TYPE_BYTES:
        setattr(message, field.name, mutator.text() * size)
    else:
        setattr(message, field.name, mutator.scalar(field))


async def upload(http: httpx.AsyncClient, mutator: Mutator, sizes: Sequence[int]) -> None:
    """Sends a form that is long somewhere. Raises Finding."""
    choose, size = mutator.random.choice, mutator.random.choice(sizes)
    fields: dict[str, Any] = {"purpose": choose(("batch", "batch", mutator.text()))}
    files = [("file", (choose(("in.jsonl", "n" * size)), choose((b"{}\n", b"[", b"\n", b"\0")) * size))]
    match choose(("file", "purpose", "expiry", "fields", "files")):
        case "purpose":
            fields["purpose"] = "p" * size
        case "expiry":
            fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * size}
        case "fields":
            fields |= {f"field{number}": "x" for number in range(min(size, 30_000))}
        case "files":
            files = [("file", ("in.jsonl", b"{}\n"))] * min(size, 30_000)
    shown = f"POST /v1/files of {str(fields)[:200]}, {len(files)} files such as {str(files[0])[:200]}"
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await http.post("/v1/files", files=files, data=fields)
    except TimeoutError as error:
        raise Finding(f"{shown}: no answer") from error
    except httpx.HTTPError as error:
        raise Finding(f"{shown}: {type(error).__name__}: {error}") from error
    if answer.status_code not in _OK:
        raise Finding(f"{shown}: {answer.status_code} {answer.text[:500]}")
    if answer.status_code == 200:
        await http.delete(f"/v1/files/{answer.json()['id']}")


async def fuzz(line: FuzzLine, seed: int) -> None:
    """One case over a line of one process. Raises Finding."""
    mutator = Mutator(seed)
    flooded = Flooded.of((await line.http.get("/openapi.json")).json())
    way = mutator.random.choice(("rest", "rest", "batch", "grpc", "file"))
    if way == "file":
        await upload(line.http, mutator, SHORT)
        return
    if way == "grpc":
        service = mutator.random.choice([*line.channels])
        await call(line.channels[service], mutator, SHORT, service)
        return
    path, content = flooded.draw(mutator, SHORT)
    await (post if way == "rest" else post_batch)(line.http, path, content)


async def fuzz_stack(url: str, addresses: dict[str, str], seeds: Sequence[int]) -> None:
    """All cases over a whole stack; none of its processes may stall, grow or end. addresses: of public gRPC ports, by
    service. Raises Finding."""
    longest, most = (0.0, ""), 0
    async with httpx.AsyncClient(base_url=url, timeout=120) as http, AsyncExitStack() as closing:
        channels = {
            service: await closing.enter_async_context(rpc.channel(address)) for service, address in addresses.items()
        }
        before = await processes(http)
        flooded = Flooded.of((await http.get("/openapi.json")).json())
        measured = await closing.enter_async_context(watched(url, addresses))
        for seed in seeds:
            try:
                what = f"seed {seed}: {await _flood(http, channels, flooded, Mutator(seed))}"
            except (Finding, httpx.HTTPError) as error:
                raise Finding(f"seed {seed}: {error!r}") from error
            found = await measured()
            if (now := await processes(http)) != before:
                raise Finding(f"{what}: of {before} a process has ended: {now}")
            if found.errors or found.stall > MAX_STALL_S or found.memory > MAX_MEMORY_BYTES:
                raise Finding(f"{what}: {found}")
            longest, most = max(longest, (found.stall, f"{found.service}, {what}")), max(most, found.memory)
    print(f"others waited for at most {longest[0]:.2f} s ({longest[1]}); a service grew by at most {most >> 20} MiB")


async def _flood(
    http: httpx.AsyncClient, channels: dict[str, grpc.aio.Channel], flooded: Flooded, mutator: Mutator
) -> str:
    """Sends one flood and returns what it was. Raises Finding."""
    way = mutator.random.choice(("rest", "rest", "rest", "batch", "grpc", "file"))
    if way == "grpc":
        service = mutator.random.choice([*channels])
        return await call(channels[service], mutator, LONG, service, is_public=True)
    if way == "file":
        await upload(http, mutator, LONG)
        return "POST /v1/files"
    path, content = flooded.draw(mutator, LONG)
    await (post if way == "rest" else post_batch)(http, path, content)
    return f"{way} {path} of {len(content)} bytes, {content[:200]!r}"
