"""Ollama's routes: its clients get the version, and errors in the shape that they read."""

from fastapi import APIRouter, Request

from pagewire import __version__
from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.operation.bodies import Version

router = APIRouter(route_class=JsonRoute, include_in_schema=False)

# All of its routes begin with this, and no others.
PREFIX = "/api/"


class OllamaError(Body):
    error: str


class OllamaDialect:
    """A `Dialect`."""

    request_id_header: bytes | None = None

    def error_body(self, error: ApiError, request_id: str) -> OllamaError:
        return OllamaError(error.message)


OLLAMA = OllamaDialect()


@router.get("/api/version")
async def version(request: Request) -> Version:
    """Returns the version of Pagewire."""
    return Version(version=__version__)
