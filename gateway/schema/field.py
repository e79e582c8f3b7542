"""A field of a body with what is said of it, in /openapi.json, /docs and docs/api.md alike."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from pagewire.gateway.core.request_context import REQUEST_ID_PATTERN

# Which service does what the field asks for.
Service = Literal["gateway", "tokenizer", "scheduler", "executor"]
HANDLED_BY = "x-handled-by"

RequestId = Annotated[str, StringConstraints(pattern=REQUEST_ID_PATTERN)]


def _not_a_number(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):  # equal to False
        raise ValueError("input should be false")
    return value


# Of a parameter whose only value asks for nothing.
Off = Annotated[Literal[False], BeforeValidator(_not_a_number)]


def field(service: Service, words: str, default: Any = None, **constraints: Any) -> Any:
    """A field that may be left out, which is the same as null. default: what then holds, if it can be said."""
    extra = {HANDLED_BY: service, "default": default}
    return Field(None, description=words, json_schema_extra=extra, **constraints)


def required(service: Service, words: str, **constraints: Any) -> Any:
    return Field(description=words, json_schema_extra={HANDLED_BY: service}, **constraints)
