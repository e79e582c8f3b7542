"""Calls with each argument between its own marks: Qwen3-Coder, GLM-4.5, MiniMax-M2.

A value has no quotes. The tool's schema determines whether it is text or JSON; without a schema, valid JSON is JSON.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.tool_calls import MAX_HEADER, ToolCallReader, check_names
from pagewire.services.tokenizer.parsers.shared.formats import (
    ANY_TEXT,
    CallableTool,
    Format,
    any_number_of,
    listed,
    regex_of,
    sequence,
    tag,
    text_of,
)
from pagewire.services.tokenizer.parsers.shared.keywords import Parameter, in_order, parameters_of
from pagewire.services.tokenizer.parsers.shared.reader import MAX_SPACE, len_of_beginning
from pagewire.services.tokenizer.parsers.shared.untyped_values import is_text, to_json, value_format


class TaggedCallReader(ToolCallReader):
    """The base of their parsers. Subclasses define the marks."""

    reads_schemas = True
    # From an opening mark to the first argument, and text that may become that. Group 1 is the tool's name.
    header: ClassVar[re.Pattern[str]]
    header_beginning: ClassVar[re.Pattern[str]]
    # From one argument's value to the next, and text that may become that. Group 1 is the argument's name.
    key: ClassVar[re.Pattern[str]]
    key_beginning: ClassVar[re.Pattern[str]]
    value_end: ClassVar[str]
    # What shows that the mark at a value's end is missing, and text that may become that.
    missing_end: ClassVar[re.Pattern[str]]
    missing_end_beginning: ClassVar[re.Pattern[str]]
    call_end: ClassVar[str]
    # Begins the next call, if no opening mark does.
    next_call: ClassVar[str] = ""
    # Whether values are on separate lines.
    values_have_lines: ClassVar[bool] = False
    # Text that models write after each mark, for grammars.
    gap: ClassVar[Format] = text_of("\n")

    def __init__(self) -> None:
        super().__init__()
        self._properties: dict[str, Any] = {}
        self._num_values = 0
        self._schema: Any = None  # of the argument that is being read
        self._value: list[str] | None = None  # its pieces; None: it is text, and returned as it arrives
        self._is_begun = False  # a part of the value was returned
        self._at_start = False  # of the value

    def _call(self, parsed: Parsed) -> bool:
        self._state = self._call
        # A first mark that stood alone has been read.
        read = self.bare_opening if self.bare_opening and self._unopened.endswith(self.bare_opening) else ""
        text = read + self._held
        header = self.header.match(text)
        if header is None:
            may_come = not self._ended and len(text) <= MAX_HEADER and self.header_beginning.fullmatch(text)
            return False if may_come else self._no_call(parsed)
        self._take(header.end() - len(read))
        self._open(parsed, header[1])
        self._properties = self.schemas.get(header[1], {})
        self._num_values = 0
        self._state = self._argument
        return True

    def _argument(self, parsed: Parsed) -> bool:
        """A state: before the next argument, or the call's end."""
        rest = self._held.lstrip()
        if rest.startswith(self.call_end) and len(self._held) - len(rest) <= MAX_SPACE:
            self._held = rest[len(self.call_end) :]
            self._emit_arguments(parsed, "}" if self._num_values else "{}")
            self._state = self._behind_call
            return True
        key = self.key.match(self._held)
        if key is not None:
            self._take(key.end())
            self._begin_value(parsed, key[1])
            return True
        may_come = self.key_beginning.fullmatch(self._held) or self.call_end.startswith(rest)
        if may_come and len(self._held) <= MAX_HEADER:
            if self._ended:
                self._held = ""  # it was cut off
            return False
        self._emit_arguments(parsed, "}" if self._num_values else "{}")
        return self._close()

    def _begin_value(self, parsed: Parsed, name: str) -> None:
        self._schema = self._properties.get(name)
        self._emit_arguments(parsed, f"{', ' if self._num_values else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_values += 1
        self._value, self._is_begun, self._at_start = (None if is_text(self._schema) else []), False, True
        self._state = self._argument_value

    def _argument_value(self, parsed: Parsed) -> bool:
        if self.values_have_lines and self._at_start and self._held:
            self._take(len(self._held) - len(self._held.removeprefix("\n")))
            self._at_start = False
        end, next_mark = self._find_value_end()
        is_whole = next_mark != -1
        if self.values_have_lines and (is_whole or not self._ended) and self._held[:end].endswith("\n"):
            end -= 1
        if not end and not is_whole:
            return False
        self._emit_value(parsed, self._take(end))
        if not is_whole:
            return False
        self._held = self._held[next_mark - end :]
        self._emit_arguments(parsed, '"' if self._value is None else to_json("".join(self._value), self._schema))
        self._state = self._argument
        return True

    def _find_value_end(self) -> tuple[int, int]:
        """Returns how much of the held text belongs to the value, and where reading continues; -1 if more text must
        come."""
        end = self._held.find(self.value_end)
        missing = self.missing_end.search(self._held, 0, len(self._held) if end == -1 else end)
        if missing is not None:
            return missing.start(), missing.start()
        if end != -1:
            return end, end + len(self.value_end)
        if self._ended:
            return len(self._held), -1
        begun = self._held.find("<", max(0, len(self._held) - MAX_HEADER))
        while begun != -1 and not self.missing_end_beginning.fullmatch(self._held, begun):
            begun = self._held.find("<", begun + 1)
        held_back = max(len_of_beginning(self._held, self.value_end), 0 if begun == -1 else len(self._held) - begun)
        return len(self._held) - held_back, -1

    def _emit_value(self, parsed: Parsed, text: str) -> None:
        if self._value is None:
            quote = "" if self._is_begun else '"'
            self._emit_arguments(parsed, quote + json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)
        self._is_begun = True

    def _behind_call(self, parsed: Parsed) -> bool:
        rest = self._held.lstrip()
        if self.next_call and len(self._held) - len(rest) <= MAX_SPACE:
            if rest.startswith(self.next_call):
                self._unopened = ""
                self._state = self._call
                return True
            if self.next_call.startswith(rest) and not self._ended:
                return False
        return self._close()

    # -- the grammar of calls ----------------------------------------------------------------------------------------

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        check_names(tools)
        return [
            tag(cls.begin_of(tool.name), sequence(cls.gap, cls._arguments_format(tool)), cls.end_of_call)
            for tool in tools
        ]

    @classmethod
    def _arguments_format(cls, tool: CallableTool) -> Format:
        parameters = parameters_of(tool)
        if parameters is None:
            name = regex_of(r"[A-Za-z_][\w.\-]{0,63}")
            return any_number_of(cls.argument_format(name, ANY_TEXT))

        def written(parameter: Parameter) -> Format:
            return cls.argument_format(text_of(parameter.name), value_format(tool, parameter))

        return in_order(parameters, written, "")

    # The end of a call, the closing marks included.
    end_of_call: ClassVar[str]

    @classmethod
    def begin_of(cls, name: str) -> str:
        """Returns the beginning of a call of a tool."""
        raise NotImplementedError

    @classmethod
    def argument_format(cls, name: Format, value: Format) -> Format:
        raise NotImplementedError


class Qwen3CoderReader(TaggedCallReader):
    """Qwen3-Coder and Qwen3.5: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

    opening = ("<tool_call>",)
    closing = ("</tool_call>",)
    marks = (*opening, *closing)
    header = re.compile(r"\s{0,99}<function=([^\s<>]{1,128})>")
    header_beginning = re.compile(r"\s{0,99}(?:<[a-z]{0,8}|<function=[^\s<>]{0,128})?")
    key = re.compile(r"\s{0,99}<parameter=([^\s<>]{1,128})>")
    key_beginning = re.compile(r"\s{0,99}(?:<[a-z]{0,9}|<parameter=[^\s<>]{0,128})?")
    value_end, call_end = "</parameter>", "</function>"
    bare_opening = "<function="
    missing_end = re.compile(r"<parameter=[^\s<>]{1,128}>|</function>\s{0,99}</tool_call>")
    missing_end_beginning = re.compile(
        r"<(?:[a-z]{0,9}|parameter=[^\s<>]{0,128}|/[a-z]{0,8}|/function>\s{0,99}(?:</?[a-z_]{0,9})?)"
    )
    values_have_lines = True
    between = "\n"
    end_of_call = "</function>\n</tool_call>"

    @classmethod
    def begin_of(cls, name: str) -> str:
        return f"<tool_call>\n<function={name}>"

    @classmethod
    def argument_format(cls, name: Format, value: Format) -> Format:
        return sequence(tag("<parameter=", name, ">\n"), tag("", value, "\n</parameter>"), cls.gap)


class Glm45Reader(TaggedCallReader):
    """GLM: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>; GLM-4.5 with line breaks."""

    opening = ("<tool_call>",)
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    header = re.compile(r"\s{0,99}([^\s<>{]{1,128})\s{0,99}(?=<arg_key>|</tool_call>)")
    header_beginning = re.compile(r"\s{0,99}(?:[^\s<>{]{1,128}\s{0,99}(?:<[a-z_/]{0,11})?)?")
    key = re.compile(r"\s{0,99}<arg_key>\s{0,99}([^\s<>]{1,128})\s{0,99}</arg_key>\s{0,99}<arg_value>")
    key_beginning = re.compile(
        r"\s{0,99}(?:<[a-z_]{0,8}|<arg_key>\s{0,99}(?:[^\s<>]{1,128}\s{0,99}(?:<[a-z_/]{0,9}|</arg_key>\s{0,99}"
        r"(?:<[a-z_]{0,10})?)?)?)?"
    )
    value_end, call_end = "</arg_value>", "</tool_call>"
    missing_end = re.compile(r"<arg_key>\s{0,99}[^\s<>]{1,128}\s{0,99}</arg_key>|</tool_call>")
    missing_end_beginning = re.compile(
        r"<(?:[a-z_]{0,7}|arg_key>\s{0,99}(?:[^\s<>]{1,128}\s{0,99}(?:</?[a-z_]{0,7})?)?|/[a-z_]{0,9})"
    )
    between = "\n"
    gap: ClassVar[Format] = {"type": "optional", "content": text_of("\n")}
    end_of_call = "</tool_call>"

    @classmethod
    def begin_of(cls, name: str) -> str:
        return f"<tool_call>{name}"

    @classmethod
    def argument_format(cls, name: Format, value: Format) -> Format:
        return sequence(
            tag("<arg_key>", name, "</arg_key>"), cls.gap, tag("<arg_value>", value, "</arg_value>"), cls.gap
        )


class MiniMaxM2Reader(TaggedCallReader):
    """MiniMax-M2: an <invoke name="name"> with <parameter name="key">value</parameter> inside <minimax:tool_call>."""

    opening = ("<minimax:tool_call>",)
    closing = ("</minimax:tool_call>",)
    marks = (*opening, *closing)
    header = re.compile(r'\s{0,99}<invoke name="([^\s<>"]{1,128})">')
    header_beginning = re.compile(r"\s{0,99}(?:<[a-z]{0,6}|<invoke [^\s<>]{0,136})?")
    key = re.compile(r'\s{0,99}<parameter name="([^\s<>"]{1,128})">')
    key_beginning = re.compile(r"\s{0,99}(?:<[a-z]{0,9}|<parameter [^\s<>]{0,136})?")
    value_end, call_end, next_call = "</parameter>", "</invoke>", "<invoke"
    missing_end = re.compile(r'<parameter name="[^\s<>"]{1,128}">|</invoke>\s{0,99}</minimax:tool_call>')
    missing_end_beginning = re.compile(
        r"<(?:[a-z]{0,9}|parameter [^\s<>]{0,136}|/[a-z]{0,6}|/invoke>\s{0,99}(?:</?[a-z:_]{0,17})?)"
    )
    end_of_call = "</invoke>\n"

    @classmethod
    def begin_of(cls, name: str) -> str:
        return f'<invoke name="{name}">'

    @classmethod
    def argument_format(cls, name: Format, value: Format) -> Format:
        return sequence(tag('<parameter name="', name, '">'), tag("", value, "</parameter>"), cls.gap)

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        calls = super().call_tags(tools, only_one=only_one)
        return [tag("<minimax:tool_call>\n", listed(calls, "", only_one=only_one), "</minimax:tool_call>")]
