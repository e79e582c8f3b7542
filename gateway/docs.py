"""What /docs says beyond the routes."""

from typing import Any

from pydantic import BaseModel

DESCRIPTION = """
OpenAI-compatible API of a Pagewire server, with vLLM's extensions.

With `--api-key`, every route but `/livez`, `/readyz` and `/health` needs the header `Authorization: Bearer KEY`.
A parameter that is not supported is refused by name, never ignored; `null` means unset.
`X-Request-Id` is taken from the request, or made, and returned.
"""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The shape of every error."""

    error: ErrorDetail


_MEANINGS = {
    400: "A parameter is wrong, unknown or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "No such route or model.",
    413: "The body is too large.",
    429: "Too many requests wait; try again after `Retry-After` seconds.",
    500: "The server failed.",
    503: "The engine is away; try again after `Retry-After` seconds.",
    504: "The engine took too long.",
}

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    **{status: {"model": ErrorResponse, "description": meaning} for status, meaning in _MEANINGS.items()},
    "default": {"model": ErrorResponse, "description": "Any other error."},
}
