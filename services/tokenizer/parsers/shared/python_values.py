"""Converts Python literals to JSON."""

import ast
import json
import warnings
from typing import Any

MAX_VALUE = 100_000  # characters of a value that is not a string; it is parsed on the event loop

# JSON's names are not Python's, but models mix them.
# A number that JSON cannot express is null.
_CONSTANTS = {"true": True, "false": False} | dict.fromkeys(("null", "nan", "NaN", "inf", "Infinity"))


def unescaped(escape: str) -> str:
    """Returns the text that an escape stands for in Python. Other text is returned as it is."""
    if escape == "\\\n":
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of doubtful escapes
            text: str = ast.literal_eval(f'"{escape}"')
    except (SyntaxError, ValueError):
        return escape
    # A surrogate pair, as JSON writes it.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def to_json(value: str) -> str | None:
    """Returns a plain value as JSON; None for any other."""
    if len(value) > MAX_VALUE:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of doubtful escapes
            text = json.dumps(_value(ast.parse(value.strip(), mode="eval").body), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text


def _value(node: ast.expr) -> Any:
    """Raises ValueError for a value that JSON cannot express."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id=name)) if name in _CONSTANTS and _CONSTANTS[name] is None:
            return None
    raise ValueError(f"{ast.dump(node)} is no plain value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("JSON has strings as keys only")
