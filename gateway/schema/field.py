"""Fields of bodies, with their descriptions for /openapi.json, /docs and docs/api.md."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from pagewire.gateway.core.request_context import REQUEST_ID_PATTERN

# The service that applies the field.
Service = Literal["gateway", "tokenizer", "scheduler", "executor"]
HANDLED_BY = "x-handled-by"

RequestId = Annotated[str, StringConstraints(pattern=REQUEST_ID_PATTERN)]


def _not_a_number(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):  # equal to False
        raise ValueError("input should be false")
    return value


# The type of a parameter that cannot be turned on.
Off = Annotated[Literal[False], BeforeValidator(_not_a_number)]


def field(service: Service, words: str, default: Any = None, **constraints: Any) -> Any:
    """Declares an optional field; null means unset. default: the value that then applies, if it is known."""
    extra = {HANDLED_BY: service, "default": default}
    return Field(None, description=words, json_schema_extra=extra, **constraints)


def required(service: Service, words: str, **constraints: Any) -> Any:
    return Field(description=words, json_schema_extra={HANDLED_BY: service}, **constraints)
