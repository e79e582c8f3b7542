"""The arguments of a call as an object, for APIs that answer with one."""

import json

import msgspec
import pydantic_core


def arguments_object(arguments: str) -> msgspec.Raw:
    """Returns the object that the model wrote; if it was cut off, the part that clients can read from a stream.

    Anything else becomes {"INVALID_JSON": text}, which is Anthropic's convention.
    """
    if not arguments:
        return msgspec.Raw(b"{}")  # cut off before the first of them
    try:
        if isinstance(pydantic_core.from_json(arguments, allow_inf_nan=False), dict):
            return msgspec.Raw(arguments.encode())
    except ValueError:
        pass
    try:
        value = pydantic_core.from_json(arguments, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = None
    return msgspec.Raw(json.dumps(value if isinstance(value, dict) else {"INVALID_JSON": arguments}).encode())
