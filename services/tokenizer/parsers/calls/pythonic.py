"""Llama 4 and 3.2: [get_weather(city="Paris"), now()], alone or between <|python_start|> and <|python_end|>.

Values become JSON: strings are returned as they arrive, other values once they are complete.
"""

import json
import re
from collections.abc import Sequence

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.tool_calls import ToolCallReader
from pagewire.services.tokenizer.parsers.shared.formats import (
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
from pagewire.services.tokenizer.parsers.shared.keywords import Parameter, in_order, parameters_of
from pagewire.services.tokenizer.parsers.shared.nesting import ValueEnd
from pagewire.services.tokenizer.parsers.shared.python_values import to_json, unescaped

_BEGIN = re.compile(r"\s{0,99}\[\s{0,99}(?=[A-Za-z_])")
_BEGIN_BEGINNING = re.compile(r"\s{0,99}(?:\[\s{0,99})?")
_NAME = re.compile(r"([A-Za-z_][\w.\-]{0,127})\(")
_NAME_BEGINNING = re.compile(r"[A-Za-z_][\w.\-]{0,127}")
_NEXT = re.compile(r"\s{0,99},\s{0,99}(?=[A-Za-z_])")
_NEXT_BEGINNING = re.compile(r"\s{0,99}(?:,\s{0,99})?")
_CALL_END = re.compile(r"\s{0,99}\)")
_KEYWORD = re.compile(r"\s{0,99}([^\W\d]\w{0,127})\s{0,99}=\s{0,99}(?=[^\s=])")
_KEYWORD_BEGINNING = re.compile(r"\s{0,99}(?:[^\W\d]\w{0,127}\s{0,99}(?:=\s{0,99})?)?")
_VALUE_END = re.compile(r"\s{0,99}(?:,|(?=\)))")
_VALUE_END_BEGINNING = re.compile(r"\s{0,99}")
# In a string: plain text, an escape, and what may become one. Both halves of a surrogate pair are one escape.
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\(?:u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}|u{_HEX}{{4}}|U{_HEX}{{8}}|x{_HEX}{{2}}|[0-7]{{1,3}}|[^uUx0-7])"
    r"|\\[uUx]",
    re.DOTALL,
)
_ESCAPE_BEGINNING = re.compile(
    rf"\\(?:u{_HEX}{{0,3}}|U{_HEX}{{0,7}}|x{_HEX}?|[0-7]{{0,2}}"
    rf"|u[dD][89abAB]{_HEX}{{2}}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?"
)


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
        """Returns the format. A bracket and a name at the beginning open a call, and without `answer` nothing else."""
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
        self._is_open = False
        self._keyword = ""
        self._emitted: set[str] = set()  # keywords
        self._quote = ""  # of the string that is read
        self._value_end = ValueEnd()
        self._pieces: list[str] = []  # of a value that is not a string

    def _start(self, parsed: Parsed) -> bool:
        return self._call(parsed)

    def _call(self, parsed: Parsed) -> bool:
        self._is_open = False
        begin = _BEGIN.match(self._held)
        if begin is None:
            return self._wait_or_leave(parsed, _BEGIN_BEGINNING)
        self._read(begin.end())
        self._state = self._call_name
        return True

    def _call_name(self, parsed: Parsed) -> bool:
        self._is_open, self._emitted = False, set()
        name = _NAME.match(self._held)
        if name is None:
            return self._wait_or_leave(parsed, _NAME_BEGINNING)
        self._read(name.end())
        self._name = name[1]
        self._state = self._argument
        return True

    def _argument(self, parsed: Parsed) -> bool:
        """A state: the next argument, or the call's end."""
        if end := _CALL_END.match(self._held):
            self._read(end.end())
            self._emit_argument(parsed, "}" if self._emitted else "{}")
            self._state = self._between
            return True
        keyword = _KEYWORD.match(self._held)
        if keyword is None:
            return self._wait_or_leave(parsed, _KEYWORD_BEGINNING)
        if keyword[1] in self._emitted:
            return self._leave(parsed)
        self._read(keyword.end())
        self._keyword = keyword[1]
        self._state = self._value_begin
        return True

    def _value_begin(self, parsed: Parsed) -> bool:
        quote = self._held[:1]
        if quote not in _PLAIN or self._held.startswith(quote * 3):
            self._value_end, self._pieces = ValueEnd(), []
            self._state = self._whole_value
            return True
        if self._held in (quote, quote * 2) and not self._ended:
            return False  # three quotes may follow
        self._take(1)
        self._quote = quote
        self._emit_keyword(parsed, '"')
        self._state = self._string
        return True

    def _string(self, parsed: Parsed) -> bool:
        if self._held.startswith(self._quote):
            self._take(1)
            self._emit_arguments(parsed, '"')
            self._state = self._behind_value
            return True
        if plain := _PLAIN[self._quote].match(self._held):
            self._emit_arguments(parsed, json.dumps(self._take(plain.end()), ensure_ascii=False)[1:-1])
            return True
        if _ESCAPE_BEGINNING.fullmatch(self._held) and not self._ended:
            return False
        escape = _ESCAPE.match(self._held)
        if escape is None:
            self._held = ""  # it was cut off
            return False
        self._emit_arguments(parsed, json.dumps(unescaped(self._take(escape.end())))[1:-1])
        return True

    def _whole_value(self, parsed: Parsed) -> bool:
        self._pieces.append(self._read(self._value_end.find(self._held)))
        if not self._value_end.found:
            return self._ended and not self._is_open and self._leave(parsed)
        value = to_json("".join(self._pieces))
        if value is None:
            return self._leave(parsed)
        self._emit_keyword(parsed, value)
        self._state = self._behind_value
        return True

    def _behind_value(self, parsed: Parsed) -> bool:
        end = _VALUE_END.match(self._held)
        if end is None:
            return self._wait_or_leave(parsed, _VALUE_END_BEGINNING)
        self._read(end.end())
        self._state = self._argument
        return True

    def _between(self, parsed: Parsed) -> bool:
        if next_call := _NEXT.match(self._held):
            self._read(next_call.end())
            self._state = self._call_name
            return True
        if not self._ended and _NEXT_BEGINNING.fullmatch(self._held):
            return False
        return self._close()

    def _emit_keyword(self, parsed: Parsed, value: str) -> None:
        name = json.dumps(self._keyword, ensure_ascii=False)
        self._emit_argument(parsed, f"{', ' if self._emitted else '{'}{name}: {value}")
        self._emitted.add(self._keyword)

    def _emit_argument(self, parsed: Parsed, text: str) -> None:
        if not self._is_open:
            self._open(parsed, self._name)
            self._is_open = True
        self._emit_arguments(parsed, text)
        self._unopened = ""

    def _wait_or_leave(self, parsed: Parsed, beginning: re.Pattern[str]) -> bool:
        if not beginning.fullmatch(self._held):
            return self._leave(parsed)
        if not self._ended:
            return False
        if not self._is_open:
            return self._no_call(parsed)
        self._held = self._unopened = ""  # it was cut off
        return False

    def _leave(self, parsed: Parsed) -> bool:
        """Ends a malformed call. One that is open stays a call, without the malformed part."""
        if not self._is_open:
            return self._no_call(parsed)
        self._emit_arguments(parsed, "}")
        self._held = self._unopened + self._held
        self._unopened = ""
        return self._close()


def _call_tag(tool: CallableTool) -> Format:
    """Returns the tag of a call. Values are JSON, which is read like Python."""
    if not _NAME_BEGINNING.fullmatch(tool.name):
        raise FormatError(f"{tool.name!r} is not a name in Python, which this model needs for calls; rename the tool")
    parameters = parameters_of(tool)
    if parameters is None:
        any_keyword = tag("", regex_of(r"[A-Za-z_]\w{0,63}"), "=")
        arguments = optional(listed([tag("", sequence(any_keyword, json_of({})), "")], ", ", only_one=False))
    else:
        arguments = in_order(parameters, _keyword, ", ")
    return tag(f"{tool.name}(", arguments, ")")


def _keyword(parameter: Parameter) -> Format:
    if not parameter.name.isidentifier():
        raise FormatError(
            f"{parameter.name!r} is not a name in Python, which this model needs for arguments; rename it"
        )
    return sequence(text_of(f"{parameter.name}="), json_of(parameter.schema))
