"""Routes that take and return JSON, without FastAPI's dependencies."""

import inspect
import json
import re
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
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.validation import with_integers

Model = TypeVar("Model", bound=BaseModel)

# Half of a surrogate pair: two halves make a character, a lone half is invalid.
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


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
                arguments["query"] = parse(query, dict(request.query_params))
            if model is not None:
                arguments["body"] = parse(model, await _read(request))
            answer = await endpoint(request=request, **arguments)
            return json_response(answer) if isinstance(answer, Body) else answer

        return handle


def parse(model: type[Model], body: Any) -> Model:
    """Returns the parsed body. Raises RequestValidationError or ApiError."""
    while True:
        try:
            return model.model_validate(body)
        except ValidationError as error:
            located = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
            if not with_integers(located, body):
                raise RequestValidationError(located, body=body) from None


async def _read(request: Request) -> Any:
    """Returns the JSON of a body; its bytes if its content type is not JSON, None if it is empty.

    Raises RequestValidationError or ApiError, RecursionError if it is nested too deeply, and UnicodeEncodeError for
    half a surrogate pair, which a text with JSON in it would carry to services that fail on it.
    """
    content = await request.body()
    if not content:
        return None
    if not _is_json(request.headers.get("content-type", "")):
        return content
    try:
        body = json.loads(content)
    except json.JSONDecodeError as error:
        invalid = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([invalid], body=error.doc) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: not UTF-8 at byte {error.start}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if _ESCAPED_SURROGATE.search(content):
        json.dumps(body, ensure_ascii=False).encode()
    return body


def _is_json(content_type: str) -> bool:
    if content_type == "application/json":
        return True
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
