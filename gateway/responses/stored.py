"""Stored responses, with their input: clients retrieve them, and continue conversations from them."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.responses.bodies.answers import InputItemList, ModelResponse, decode_response
from pagewire.gateway.responses.bodies.items import (
    FunctionCallInput,
    FunctionCallOutput,
    ItemReference,
    Items,
    MessageItem,
)
from pagewire.gateway.responses.bodies.queries import InputItemsQuery
from pagewire.gateway.responses.conversation import AnyItem
from pagewire.gateway.store import Bound, Lease, Store, Work, held
from pagewire.wire.tenants import NO_TENANT, Tenant, present

PREFIX = "resp_"
# The most responses of one conversation, and bytes and items of their inputs and outputs.
MAX_CHAIN = 1000
MAX_CHAIN_BYTES = 32 * 1024 * 1024
MAX_CHAIN_ITEMS = 20_000

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(Items)


class Stored(msgspec.Struct, gc=False):
    """A document of the store."""

    response: bytes  # JSON
    input: bytes  # JSON of the items, each with its id
    previous: str | None = None
    logprobs: bool = False  # text has log probabilities
    num_outputs: int = 0  # of a response in the background that has ended
    tenant: Tenant = NO_TENANT  # of a response in the background


class Responses:
    """The responses of all tenants; a tenant finds its own. Every method raises ApiError if the store fails."""

    def __init__(self, store: Store, bound: Bound, ttl_s: float) -> None:
        self._documents = store.documents("response", bound)
        self._ttl_s = ttl_s

    async def save(self, id: str, stored: Stored, *, first: Work | None = None) -> None:
        """Saves a response. first: work to do first in the same transaction."""
        owner = present.get().name
        await self._documents.put(id, _encode(stored), owner=owner, expires_at=self._expires_at(), first=first)

    async def update(self, id: str, stored: Stored, lease: Lease) -> bool:
        """Saves a response, unless it was deleted. Returns whether it existed. Raises LeaseLost."""
        return await self._documents.put(
            id, _encode(stored), expires_at=self._expires_at(), first=held(lease), adds=False
        )

    async def find(self, id: str) -> Stored | None:
        """Finds a response of the present tenant."""
        document = await self._documents.get(id, present.get().name)
        return None if document is None else _decode(document.value)

    async def find_any(self, id: str) -> Stored | None:
        """Finds a response of any tenant."""
        document = await self._documents.get(id)
        return None if document is None else _decode(document.value)

    async def get(self, id: str) -> Stored:
        """Raises ApiError 404."""
        if (stored := await self.find(id)) is None:
            raise ApiError(404, f"no response {id!r}: {self._why()}", param="response_id", code="response_not_found")
        return stored

    async def delete(self, id: str, *, first: Work) -> None:
        """Deletes a response. first: work of the same transaction. Raises ApiError 404."""
        if not await self._documents.delete(id, present.get().name, first=first):
            await self.get(id)

    async def conversation(self, id: str) -> list[AnyItem]:
        """Returns all items up to this response and its output. Raises ApiError 400 naming a missing response."""
        turns: list[list[AnyItem]] = []
        size, num_items, next_id = 0, 0, id or None
        while next_id is not None:
            stored = await self._previous(next_id)
            size += len(stored.input) + len(stored.response)
            num_items += _num_items(stored)
            if len(turns) == MAX_CHAIN or size > MAX_CHAIN_BYTES or num_items > MAX_CHAIN_ITEMS:
                message = (
                    f"the conversation that ends with {id!r} has more than {MAX_CHAIN} responses, {MAX_CHAIN_ITEMS}"
                    f" items or {MAX_CHAIN_BYTES} bytes: begin a new one, with what matters as input"
                )
                raise ApiError(400, message, param="previous_response_id")
            turns.append([*_ITEMS.validate_json(stored.input), *_output_items(stored)])
            next_id = stored.previous
        return [item for turn in reversed(turns) for item in turn]

    async def _previous(self, id: str) -> Stored:
        param, code = "previous_response_id", "previous_response_not_found"
        if (stored := await self.find(id)) is None:
            raise ApiError(400, f"no response {id!r} to continue from: {self._why()}", param=param, code=code)
        if not has_ended(stored):
            raise ApiError(400, f"response {id!r} is still {status_of(stored)}: wait for its end", param=param)
        return stored

    async def resolve(self, items: Sequence[AnyItem]) -> list[AnyItem]:
        """Returns the items with references replaced. Raises ApiError 400 for an item that is not stored."""
        resolved: list[AnyItem] = []
        responses: dict[str, dict[str | None, AnyItem]] = {}  # by id, with their items by id
        num_bytes = num_items = 0
        for index, item in enumerate(items):
            if not isinstance(item, ItemReference):
                resolved.append(item)
                continue
            parts = item.id.split("_")
            if (id := PREFIX + parts[1] if len(parts) == 3 else "") not in responses:
                stored = await self.find(id) if id else None
                if stored is not None:
                    num_bytes += len(stored.input) + len(stored.response)
                    num_items += _num_items(stored)
                _check_referenced(num_bytes, num_items, index)
                found = [] if stored is None else [*_ITEMS.validate_json(stored.input), *_output_items(stored)]
                responses[id] = {one.id: one for one in found}
            if (one := responses[id].get(item.id)) is None:
                raise ApiError(
                    400,
                    f"no item {item.id!r}: {self._why()}; give the item itself",
                    param=f"input[{index}].id",
                    code="item_not_found",
                )
            num_bytes += len(one.model_dump_json())
            _check_referenced(num_bytes, num_items, index)
            resolved.append(one)
        return resolved

    async def input_items(self, id: str, query: InputItemsQuery) -> InputItemList:
        """Returns a page of the input. Raises ApiError."""
        items: list[dict[str, Any]] = msgspec.json.decode((await self.get(id)).input)
        if query.order == "desc":
            items.reverse()
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise ApiError(404, f"no item {query.after!r} in the input of {id!r}", param="after")
            items = items[ids.index(query.after) + 1 :]
        page = items[: query.limit]
        return InputItemList(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=len(items) > len(page),
        )

    def _expires_at(self) -> float:
        return time.time() + self._ttl_s

    def _why(self) -> str:
        return (
            "it was never stored (`store: false`), was deleted, or has expired: responses are kept for"
            f" {_duration(self._ttl_s)}, and the oldest make room for new ones"
        )


RESPONSES = AppState[Responses]("responses")


def _num_items(stored: Stored) -> int:
    """Returns how many items the input of a response has."""
    return len(msgspec.json.decode(stored.input, type=list[msgspec.Raw]))


def _check_referenced(num_bytes: int, num_items: int, index: int) -> None:
    """Raises ApiError 400 if the items that an input names, and the responses that hold them, are too large."""
    if num_bytes > MAX_CHAIN_BYTES or num_items > MAX_CHAIN_ITEMS:
        message = (
            f"the responses with the items that input names have more than {MAX_CHAIN_BYTES} bytes or {MAX_CHAIN_ITEMS}"
            " items; name items of fewer responses, or give the items themselves"
        )
        raise ApiError(400, message, param=f"input[{index}].id")


def _duration(seconds: float) -> str:
    return f"{seconds / 86400:g} days" if seconds >= 86400 else f"{seconds:g} seconds"


def new_id() -> str:
    return PREFIX + uuid.uuid4().hex


def status_of(stored: Stored) -> str:
    return msgspec.json.decode(stored.response, type=_Status).status


def has_ended(stored: Stored) -> bool:
    return status_of(stored) not in ("queued", "in_progress")


class _Status(msgspec.Struct):
    status: str


class _Output(msgspec.Struct):
    output: msgspec.Raw


def _output_items(stored: Stored) -> list[AnyItem]:
    return _ITEMS.validate_json(bytes(msgspec.json.decode(stored.response, type=_Output).output))


def stored_input(id: str, items: Sequence[AnyItem]) -> bytes:
    """Returns the JSON of a response's own input, in its long form, each item with an id."""
    return msgspec.json.encode([_long_form(item, id.removeprefix(PREFIX), i) for i, item in enumerate(items)])


def _long_form(item: AnyItem, hex: str, index: int) -> dict[str, Any]:
    value: dict[str, Any] = item.model_dump(exclude_none=True)
    kind = value.setdefault("type", "message")
    value.setdefault("id", f"{_ID_PREFIXES[kind]}_{hex}_i{index}")
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part: dict[str, Any] = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.content, "annotations": []}
        value["content"] = [part]
    if isinstance(item, MessageItem | FunctionCallInput | FunctionCallOutput):
        value.setdefault("status", "completed")
    return value


def stored_response(response: ModelResponse, input: bytes) -> Stored:
    """Returns the document of a response that has ended."""
    return Stored(encode(response), input, response.previous_response_id)


def response_of(stored: Stored) -> ModelResponse:
    return decode_response(stored.response)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Stored).decode
