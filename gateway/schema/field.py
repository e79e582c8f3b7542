"""A field of a body with what is said of it, in /openapi.json, /docs and docs/api.md alike."""

from typing import Any, Literal

from pydantic import Field

# Which service does what the field asks for.
Service = Literal["gateway", "tokenizer", "scheduler", "executor"]
HANDLED_BY = "x-handled-by"


def field(service: Service, words: str, default: Any = None, **constraints: Any) -> Any:
    """A field that may be left out, which is the same as null. default: what then holds, if it can be said."""
    extra = {HANDLED_BY: service, "default": default}
    return Field(None, description=words, json_schema_extra=extra, **constraints)


def required(service: Service, words: str, **constraints: Any) -> Any:
    return Field(description=words, json_schema_extra={HANDLED_BY: service}, **constraints)
