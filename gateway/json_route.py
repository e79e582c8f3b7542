"""Routes whose endpoint takes a JSON body: from bytes to its model, without FastAPI's search for dependencies."""

import json
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from pagewire.gateway.errors import ApiError


class JsonRoute(APIRoute):
    """A route of `endpoint(body: Model, request) -> Response`.

    It is documented and refuses what it cannot read as any of FastAPI's. Their handler takes longer than all else that
    the gateway does for a short request, mostly to find that there are no dependencies.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        model: type[BaseModel] = get_type_hints(endpoint)["body"]

        async def handle(request: Request) -> Response:
            body = await _read(request)
            try:
                parsed = model.model_validate(body)
            except ValidationError as error:
                located = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
                raise RequestValidationError(located, body=body) from None
            response: Response = await endpoint(parsed, request)
            return response

        return handle


async def _read(request: Request) -> Any:
    """The body's JSON; its bytes if it does not claim to be JSON, None if it is empty.

    Raises RequestValidationError or ApiError.
    """
    content = await request.body()
    if not content:
        return None
    if not _is_json(request.headers.get("content-type", "")):
        return content
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        invalid = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([invalid], body=error.doc) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: not UTF-8 at byte {error.start}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None


def _is_json(content_type: str) -> bool:
    if content_type == "application/json":
        return True
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
