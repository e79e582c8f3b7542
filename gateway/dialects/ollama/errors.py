"""Errors as Ollama's clients read them: {"error": message}."""

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError

# All of its routes begin with this, and no others.
PREFIX = "/api/"


class OllamaError(Body):
    """An error of Ollama's API. In a stream, it is the last line."""

    error: str


class OllamaDialect:
    """A `Dialect`."""

    request_id_header: bytes | None = None

    def error_body(self, error: ApiError, request_id: str) -> OllamaError:
        return OllamaError(error.message)


OLLAMA = OllamaDialect()
