"""Errors as TGI's clients read them: {"error": message, "error_type": kind}."""

from collections.abc import Mapping

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.dialects.tgi.bodies import TgiError

PATH = "/generate_stream"
_TYPES: Mapping[int, str] = {429: "overloaded", 503: "overloaded"}


class TgiDialect:
    """A `Dialect`."""

    request_id_header: bytes | None = None

    def error_body(self, error: ApiError, request_id: str) -> TgiError:
        otherwise = "validation" if error.status < 500 else "generation"
        return TgiError(error.message, _TYPES.get(error.status, otherwise))


TGI = TgiDialect()
