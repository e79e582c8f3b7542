"""The OpenAPI document: FastAPI's routes and request bodies, and the declared answers."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from pagewire.config.sampling_params import INT64_MAX
from pagewire.gateway.core.body import Body, ErrorResponse
from pagewire.process.worker_process import WorkerProcess

DESCRIPTION = """
OpenAI's, Anthropic's and Ollama's APIs of a Pagewire server, with vLLM's extensions.

With `--api-key` or `--api-key-file`, every route but the page's files, `/livez`, `/readyz`, `/ready`, `/health`
and `/ping` needs the header `Authorization: Bearer KEY`, or `x-api-key: KEY`.
Unsupported parameters are refused by name, never ignored; `null` means unset.
`X-Request-Id` comes from the request or is generated, and is returned.
"""

# Seconds: far longer than a busy machine takes.
_BUILD_S = 60.0
_REF = "#/components/schemas/{name}"

Responses = dict[int | str, dict[str, Any]]


def content(body: type[Body], media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _REF.format(name=body.__name__)}}}


def content_of(bodies: Sequence[type[Body]], media_type: str = "application/json") -> dict[str, Any]:
    """Describes content that is one of several bodies."""
    return {media_type: {"schema": {"anyOf": [{"$ref": _REF.format(name=body.__name__)} for body in bodies]}}}


def events_of(bodies: Sequence[type[Body]], *, done: bool) -> dict[str, Any]:
    """Describes a stream of events as OpenAPI 3.2 does: the data of each is JSON of one of the bodies.

    done: whether the data of the last event is `[DONE]`.
    """
    refs = [{"$ref": _REF.format(name=body.__name__)} for body in bodies]
    data: dict[str, Any] = {"contentMediaType": "application/json", "contentSchema": {"anyOf": refs}}
    if done:
        data = {"if": {"const": "[DONE]"}, "then": True, "else": data}
    event = {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"} | data},
        "required": ["data"],
    }
    return {"text/event-stream": {"schema": event}}


def response(body: type[Body], description: str = "The answer.") -> dict[str, Any]:
    return {"description": description, "content": content(body)}


def responses_by_client(answers: Sequence[type[Body]], errors: Sequence[type[Body]]) -> Responses:
    """Describes a route that answers the clients of several APIs, each in its own shapes."""
    return {200: {"description": "The answer.", "content": content_of(answers)}} | error_responses(*errors)


def generation_responses(whole: type[Body], chunk: type[Body]) -> Responses:
    """Describes a route that answers with `whole`, or streams events with a `chunk` each."""
    answer = response(whole, "The answer; with `stream: true` as events with a chunk each, then `[DONE]`.")
    answer["content"] |= events_of((chunk, ErrorResponse), done=True)
    return {200: answer}


def event_responses(whole: type[Body], events: Sequence[type[Body]]) -> Responses:
    """Describes a route that answers with `whole`, or streams events of several kinds, each named by its `type`."""
    answer = response(whole, "The answer; with `stream: true` as events.")
    answer["content"] |= events_of(events, done=False)
    return {200: answer}


def native_responses(*outputs: type[Body], events: Sequence[type[Body]], done: bool) -> Responses:
    """Describes a route that answers with one output or a list of them, or streams events.

    done: as for events_of().
    """
    answer = response(outputs[0], "An output, or a list of them; with `stream: true` as events.")
    of_one = [{"$ref": _REF.format(name=output.__name__)} for output in outputs]
    lists = [{"type": "array", "items": one} for one in of_one]
    answer["content"]["application/json"]["schema"] = {"anyOf": [*of_one, *lists]}
    answer["content"] |= events_of(events, done=done)
    return {200: answer}


def line_responses(line: type[Body], error: type[Body], media_type: str) -> Responses:
    """Describes a route that answers with `line`, or streams several, each a line of JSON; the last may be `error`."""
    answer = response(line, "The answer; unless `stream` is false as lines, one object each.")
    answer["content"] |= content_of((line, error), media_type)
    return {200: answer}


_ERRORS: dict[int | str, str] = {
    400: "A parameter is invalid, unknown or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "No such route or model.",
    413: "The body is too large.",
    429: "Too many requests wait; try again after `Retry-After` seconds.",
    500: "The server failed.",
    503: "The engine is unavailable; try again after `Retry-After` seconds.",
    504: "The engine took too long.",
    "default": "Any other error.",
}


def error_responses(*bodies: type[Body]) -> Responses:
    """Describes the errors of a route that reports them as one of the bodies."""
    if len(bodies) == 1:
        return {status: response(bodies[0], meaning) for status, meaning in _ERRORS.items()}
    return {status: {"description": meaning, "content": content_of(bodies)} for status, meaning in _ERRORS.items()}


ERROR_RESPONSES = error_responses(ErrorResponse)


class DocumentedApp(FastAPI):
    """A FastAPI application with every subclass of Body in its document."""

    def __init__(self, *, document_url: str | None, same: Callable[[], "DocumentedApp"], **options: Any) -> None:
        """document_url: where the document is served, if it is. same: makes this application in another process.
        options: FastAPI's."""
        super().__init__(openapi_url=None, docs_url=None, redoc_url=None, **options)
        self.openapi_url = document_url
        self._same = same
        self._building: asyncio.Task[bytes] | None = None
        if document_url is not None:
            self.add_route(document_url, self._get_document, include_in_schema=False)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for name, schema in _response_schemas():
                if name in schemas:
                    raise ValueError(f"a request and an answer have the name {name}: rename one of them")
                schemas[name] = schema
            _make_bounds_exact(schemas)
        document: dict[str, Any] = super().openapi()
        return document

    def encoded(self) -> bytes:
        """Returns the document as JSON."""
        return msgspec.json.encode(self.openapi())

    async def _get_document(self, request: Request) -> Response:
        building = self._building
        if building is None or (building.done() and (building.cancelled() or building.exception())):
            building = self._building = asyncio.create_task(asyncio.to_thread(self._built_elsewhere))
        # The process works on when a request is cancelled, so others wait for the same one.
        return Response(await asyncio.shield(building), media_type="application/json")

    def _built_elsewhere(self) -> bytes:
        """Builds the document in another process: it takes half a second, in which streams would stand still here."""
        worker = WorkerProcess(self._same, "builder of the API's document")
        try:
            encoded: bytes = worker.call("encoded", (), _BUILD_S)
            return encoded
        finally:
            worker.close()


def _make_bounds_exact(value: Any) -> None:
    """Restores bounds of 64 bits, which FastAPI rounds to floats."""
    if isinstance(value, dict):
        if value.get("type") == "integer":
            for name, exact in (("minimum", max), ("maximum", min)):
                if isinstance(bound := value.get(name), float):
                    value[name] = exact(int(bound), -INT64_MAX - 1 if exact is max else INT64_MAX)
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        _make_bounds_exact(one)


def _response_schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    bodies = Body.__subclasses__()
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
    for body in bodies:
        if body.__name__ not in schemas:
            raise ValueError(f"two answers have the name {body.__name__}: rename one of them")
        schema = schemas[body.__name__]
        # Only fields that may be UNSET can be absent; other defaults are for the code.
        fields = msgspec.structs.fields(body)
        schema["required"] = [field.encode_name for field in fields if field.default is not msgspec.UNSET]
        if (tag_field := body.__struct_config__.tag_field) is not None:
            schema["required"].append(tag_field)
        for member in schema["properties"].values():
            member.pop("default", None)
        yield body.__name__, schema
