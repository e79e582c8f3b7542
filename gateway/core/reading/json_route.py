"""Routes that take and return JSON, without FastAPI's dependencies."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.body import Body
from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.reading.json_content import parse_json, with_integers

Model = TypeVar("Model", bound=BaseModel)

# Lists are reported one after the other; a body of more lists of floats than this is refused for them.
_MAX_ATTEMPTS = 16


class JsonRoute(APIRoute):
    """A route of `endpoint(request, body: Model, ...) -> Body`, or `-> Response`; `...`: the path's parameters.

    The body is optional, and so are the query parameters, `query: Annotated[Model, Query()]`. FastAPI documents both;
    the returned type is documented as the answer. FastAPI's own handler takes longer than the rest of a short request,
    mostly to look for dependencies.
    """

    def __init__(
        self, path: str, endpoint: Callable[..., Any], *, responses: openapi.Responses | None = None, **options: Any
    ) -> None:
        returned = get_type_hints(endpoint)["return"]
        if issubclass(returned, Body):
            responses = {200: openapi.response(returned), **(responses or {})}
        super().__init__(path, endpoint, responses=responses, **options | {"response_model": None})
        unknown = inspect.signature(endpoint).parameters.keys() - {"request", "body", "query", *self.param_convertors}
        if unknown:
            raise TypeError(
                f"{path}: an endpoint takes request, body, query and the parameters of its path, not {sorted(unknown)}"
            )

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        hints = get_type_hints(endpoint)
        model: type[BaseModel] | None = hints.get("body")
        query: type[BaseModel] | None = hints.get("query")

        async def handle(request: Request) -> Response:
            arguments = dict(request.path_params)
            if query is not None:
                arguments["query"] = await parse(query, dict(request.query_params))
            if model is not None:
                arguments["body"] = await parse(model, await _read(request))
            answer = await endpoint(request=request, **arguments)
            return json_response(answer) if isinstance(answer, Body) else answer

        return handle


async def parse(model: type[Model], body: Any) -> Model:
    """Returns the parsed body. Raises RequestValidationError or ApiError."""
    for attempts_left in reversed(range(_MAX_ATTEMPTS)):
        try:
            return model.model_validate(body)
        except ValidationError as error:
            found = error.errors(include_url=False)
            located = [{**one, "loc": ("body", *one["loc"])} for one in found]
            if not attempts_left or not with_integers(located, body):
                raise RequestValidationError(located, body=body) from None
        await asyncio.sleep(0)  # a large body takes a while
    raise AssertionError("the last attempt returns or raises")


async def _read(request: Request) -> Any:
    """Returns the JSON of a body; its bytes if its content type is not JSON, None if it is empty.

    Raises what parse_json() does.
    """
    content = await request.body()
    if not content:
        return None
    if not _is_json(request.headers.get("content-type", "")):
        return content
    return await parse_json(content)


def _is_json(content_type: str) -> bool:
    if content_type == "application/json":
        return True
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
