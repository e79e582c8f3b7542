"""A client that reads whole answers, and comes again where it may."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.answers import Received, whole
from tests.chaos.faults.catalogue import Request

# Statuses of what passes, after which a kept request is made again.
PASSING = (503, 507)
_PASSING_ERROR = re.compile("service_unavailable_error|overloaded_error|no space is left")
PAUSE_S = 0.05
POLL_S = 0.1


class Trouble(Exception):
    """Something a client sees that is no answer. What may pass, a patient client tries again."""

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


@dataclass
class Answer:
    value: Any = None
    num_events: int = 0
    longest_silence: float = 0.0  # seconds between two events
    troubles: list[str] = field(default_factory=list)  # that were met on the way


class Client:
    """One request and its answer."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        base_urls: list[str],
        request: Request,
        *,
        key: str | None = None,
        patience: float | None = None,
        on_event: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """base_urls: of gateways, the first to be asked first. key: Idempotency-Key, with which it comes again after
        any trouble that may pass. patience: seconds of silence after which it tries elsewhere."""
        self.answer = Answer()
        self._http = http
        self._base_urls = base_urls
        self._request = request
        self._key = key
        self._headers = {} if key is None else {"Idempotency-Key": key}
        self._timeout = httpx.Timeout(patience or 120.0)
        self._on_event = on_event
        self._received = Received()
        self._last_number = -1
        self._last_event = 0.0

    async def run(self) -> Answer:
        """Raises Trouble."""
        if self._request.is_batch:
            self.answer.value = await self._batch()
        elif self._request.is_stream:
            await self._patiently(self._stream)
            self.answer.value = self._received.value
        else:
            value = await self._patiently(self._post)
            if self._request.body.get("background"):
                value = await self._until_ended(f"responses/{value['id']}")
            self.answer.value = whole(value)
        return self.answer

    async def _patiently(self, act: Callable[[str], Awaitable[Any]]) -> Any:
        """act: with the URL of a gateway."""
        while True:
            try:
                return await act(f"{self._base_urls[0]}/v1")
            except (Trouble, httpx.TransportError) as error:
                self.answer.troubles.append(f"{type(error).__name__} {error}")
                if self._key is None or (isinstance(error, Trouble) and not error.may_pass):
                    raise Trouble(self.answer.troubles[-1], may_pass=False) from error
            self._base_urls = [*self._base_urls[1:], self._base_urls[0]]
            await asyncio.sleep(PAUSE_S)

    async def _event(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.answer.num_events:
            self.answer.longest_silence = max(self.answer.longest_silence, now - self._last_event)
        self._last_event = now
        self.answer.num_events += 1
        if self._on_event is not None:
            await self._on_event()

    # -- answers that come at once -----------------------------------------------------------------------------------

    async def _post(self, base_url: str) -> Any:
        url = f"{base_url}/{self._request.path}"
        body = self._request.body
        return await self._json(self._http.post(url, json=body, headers=self._headers, timeout=self._timeout))

    async def _json(self, call: Awaitable[httpx.Response]) -> Any:
        response = await call
        _check(response.status_code, response.text)
        await self._event()
        return response.json()

    async def _until_ended(self, path: str) -> Any:
        while True:
            value = await self._patiently(lambda base_url: self._json(self._http.get(f"{base_url}/{path}")))
            if value["status"] in ("failed", "cancelled", "expired"):
                raise Trouble(f"it ended as {value}", may_pass=False)
            if value["status"] in ("completed", "incomplete"):
                return value
            await asyncio.sleep(POLL_S)

    async def _batch(self) -> Any:
        """The bodies of its answers, by line."""
        url = f"/v1/{self._request.path}"
        line = {"method": "POST", "url": url}
        lines = [
            {"custom_id": str(number), **line, "body": self._request.body | {"seed": number}} for number in range(6)
        ]
        content = b"".join(json.dumps(one).encode() + b"\n" for one in lines)

        async def upload(base_url: str) -> Any:
            files = {"file": ("in.jsonl", content)}
            return await self._json(self._http.post(f"{base_url}/files", files=files, data={"purpose": "batch"}))

        file = await self._patiently(upload)
        asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "1h"}
        batch = await self._patiently(lambda base: self._json(self._http.post(f"{base}/batches", json=asked)))
        batch = await self._until_ended(f"batches/{batch['id']}")
        if batch["error_file_id"] is not None:
            raise Trouble(f"the batch has errors: {batch}", may_pass=False)

        async def download(base_url: str) -> str:
            response = await self._http.get(f"{base_url}/files/{batch['output_file_id']}/content")
            _check(response.status_code, response.text)
            return response.text

        rows = [json.loads(row) for row in (await self._patiently(download)).splitlines()]
        if len({row["custom_id"] for row in rows}) != len(rows):
            raise Trouble("the batch has a line twice", may_pass=False)
        return {row["custom_id"]: whole(row["response"]["body"]) for row in rows}

    # -- streams -----------------------------------------------------------------------------------------------------

    async def _stream(self, base_url: str) -> None:
        url, body = f"{base_url}/{self._request.path}", self._request.body
        async with self._http.stream("POST", url, json=body, headers=self._headers, timeout=self._timeout) as response:
            if response.status_code != 200:
                _check(response.status_code, (await response.aread()).decode(errors="replace"))
            async for event in _events(response):
                await self._read(event)
        if not self._received.has_ended:
            raise Trouble("the stream ended in the middle", may_pass=True)

    async def _read(self, event: dict[str, str]) -> None:
        if self._key is not None:
            self._check_number(event)
        data = event.get("data", "")
        if data == "[DONE]":
            self._received.has_ended = True
        elif data:
            self._received.add(json.loads(data))
        if (error := self._received.error) is not None:
            self._received.error = None
            raise Trouble(f"in the stream: {error}", may_pass=bool(_PASSING_ERROR.search(error)))
        if self._key is not None and "id" in event:
            self._headers["Last-Event-ID"] = event["id"]
        await self._event()

    def _check_number(self, event: dict[str, str]) -> None:
        if "id" not in event:
            return  # an error: it is no part of the answer
        number = int(event["id"].rpartition("-")[2])
        if number != self._last_number + 1:
            raise Trouble(f"event {number} follows event {self._last_number}", may_pass=False)
        self._last_number = number


def _check(status: int, text: str) -> None:
    if status != 200:
        raise Trouble(f"{status}: {text[:400]}", may_pass=status in PASSING)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, str]]:
    unread = ""
    async for piece in response.aiter_text():
        *events, unread = (unread + piece).split("\n\n")
        for event in events:
            fields = (line.partition(": ") for line in event.splitlines() if line and not line.startswith(":"))
            yield {name: value for name, _, value in fields}
