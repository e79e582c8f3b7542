"""[get_weather(city="Paris"), now()] as the whole answer, or between <|python_start|> and <|python_end|>: Llama
4 and 3.2.

A call is told when it is whole: its values become JSON.
"""

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from pagewire.services.tokenizer.parsers.formats import (
    CallableTool,
    Format,
    FormatError,
    amid_text,
    json_of,
    listed,
    one_of,
    optional,
    regex_of,
    sequence,
    tag,
    text_of,
)
from pagewire.services.tokenizer.parsers.keywords import Parameter, in_order, parameters_of
from pagewire.services.tokenizer.parsers.reader import Parsed
from pagewire.services.tokenizer.parsers.tool_calls import ObjectEnd, ToolCallReader

MAX_CALL = 100_000  # characters; it is parsed on the event loop

_BEGIN = re.compile(r"\s{0,99}\[\s{0,99}(?=[A-Za-z_])")
_BEGIN_BEGINNING = re.compile(r"\s{0,99}(?:\[\s{0,99})?")
_NAME = re.compile(r"([A-Za-z_][\w.\-]{0,127})(?=\()")
_NAME_BEGINNING = re.compile(r"[A-Za-z_][\w.\-]{0,127}")
_NEXT = re.compile(r"\s{0,99},\s{0,99}(?=[A-Za-z_])")
_NEXT_BEGINNING = re.compile(r"\s{0,99}(?:,\s{0,99})?")
# JSON's names are not Python's, but models mix them.
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicReader(ToolCallReader):
    opening = ("<|python_start|>",)
    closing = ("]", "<|python_end|>")
    marks = ("<|python_start|>", "<|python_end|>")

    @classmethod
    def output_format(
        cls,
        tools: Sequence[CallableTool],
        *,
        only_one: bool,
        answer: Format | None = None,
        excludes: Sequence[str] = (),
    ) -> Format:
        """A bracket and a name at the beginning open a call: without `answer`, none begins like that."""
        calls = tag("[", listed(map(_call_tag, tools), ", ", only_one=only_one), "]")
        marked = tag("<|python_start|>", calls, "<|python_end|>")
        if answer is not None:
            return one_of(calls, marked, answer)
        text = amid_text(cls.opening, [marked], only_one=only_one, excludes=excludes)
        begin = regex_of(r"\s{0,255}([^\s\[<]|\[[^A-Za-z_\s]|<[^|])")
        return one_of(calls, marked, sequence(begin, text), text_of(""))

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._end = _CallEnd()
        self._pieces: list[str] = []

    def _start(self, parsed: Parsed) -> bool:
        return self._call(parsed)

    def _call(self, parsed: Parsed) -> bool:
        begin = _BEGIN.match(self._held)
        if begin is None:
            return False if not self._ended and _BEGIN_BEGINNING.fullmatch(self._held) else self._no_call(parsed)
        self._read(begin.end())
        self._state = self._call_name
        return True

    def _call_name(self, parsed: Parsed) -> bool:
        name = _NAME.match(self._held)
        if name is None:
            return False if not self._ended and _NAME_BEGINNING.fullmatch(self._held) else self._no_call(parsed)
        self._name = self._read(name.end())
        self._end, self._pieces = _CallEnd(), []
        self._state = self._call_arguments
        return True

    def _call_arguments(self, parsed: Parsed) -> bool:
        self._pieces.append(self._read(self._end.find(self._held)))
        if not self._end.found:
            return self._ended and self._no_call(parsed)
        arguments = _to_json("".join(self._pieces))
        if arguments is None:
            return self._no_call(parsed)
        self._open(parsed, self._name)
        self._tell_arguments(parsed, arguments)
        self._state = self._between
        return True

    def _between(self, parsed: Parsed) -> bool:
        if next_call := _NEXT.match(self._held):
            self._read(next_call.end())
            self._state = self._call_name
            return True
        if not self._ended and _NEXT_BEGINNING.fullmatch(self._held):
            return False
        return self._close()


def _call_tag(tool: CallableTool) -> Format:
    """Values are written as JSON, which is read like Python's."""
    if not _NAME_BEGINNING.fullmatch(tool.name):
        raise FormatError(f"{tool.name!r} is no name of a function in Python, which is how this model calls")
    parameters = parameters_of(tool)
    if parameters is None:
        any_keyword = tag("", regex_of(r"[A-Za-z_]\w{0,63}"), "=")
        arguments = optional(listed([tag("", sequence(any_keyword, json_of({})), "")], ", ", only_one=False))
    else:
        arguments = in_order(parameters, _keyword, ", ")
    return tag(f"{tool.name}(", arguments, ")")


def _keyword(parameter: Parameter) -> Format:
    if not parameter.name.isidentifier():
        raise FormatError(f"{parameter.name!r} is no name of an argument in Python, which is how this model calls")
    return sequence(text_of(f"{parameter.name}="), json_of(parameter.schema))


class _CallEnd(ObjectEnd):
    """Where the parenthesis of a call closes."""

    _outside_strings = re.compile(r"""["'{}()\[\]]""")


def _to_json(arguments: str) -> str | None:
    """Of "(city='Paris', days=2)"; None if it is anything but names with plain values."""
    if len(arguments) > MAX_CALL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of doubtful escapes
            call = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return None if None in values or len(values) < len(call.keywords) else text


def _value(node: ast.expr) -> Any:
    """Raises ValueError for what JSON cannot say."""
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
    raise ValueError(f"{ast.dump(node)} is no plain value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("JSON has strings as keys only")
