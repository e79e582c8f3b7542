"""Calls as JSON objects: {"name": ..., "arguments": {...}}, or "parameters", in either order."""

import json
import re
from collections.abc import Callable
from typing import ClassVar

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.tool_calls import ToolCallReader
from pagewire.services.tokenizer.parsers.shared.json_repair import repaired
from pagewire.services.tokenizer.parsers.shared.nesting import ObjectEnd, ValueEnd

# Patterns, some followed by a pattern of text that may still become a match.
_BEGIN = re.compile(r"\s{0,99}(?:```[a-z]{0,9}\s{0,99})?(?:\[\s{0,99})?\{")
_BEGIN_BEGINNING = re.compile(r"\s{0,99}(?:`{1,2}|```[a-z]{0,9}\s{0,99})?(?:\[\s{0,99})?")
_END = re.compile(r"\s{0,99},?\s{0,99}\}")
_MEMBER = re.compile(r"""\s{0,99},?\s{0,99}(["'])(\w{1,16})\1\s{0,99}:\s{0,99}(?=\S)""")
_MEMBER_BEGINNING = re.compile(r"""\s{0,99},?\s{0,99}(?:["']\w{0,16}(?:["']\s{0,99}(?::\s{0,99})?)?)?""")
_STRING = re.compile(r"""\"(?:[^"\\]|\\.){0,256}\"|'(?:[^'\\]|\\.){0,256}'""", re.DOTALL)
_STRING_BEGINNING = re.compile(r""""(?:[^"\\]|\\.){0,256}\\?|'(?:[^'\\]|\\.){0,256}\\?""", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters")


class JsonCallReader(ToolCallReader):
    """The base of their parsers. Subclasses enter the state `_object` where a call's object begins."""

    # Whether an object without arguments is a call of a tool that takes none.
    takes_name_alone: ClassVar[bool] = True
    # Text between two objects.
    separator: ClassVar[str] = ""
    separator_is_optional: ClassVar[bool] = False

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        super().__init__(new_id)
        self._is_open = False
        self._name = ""
        self._key = ""  # of the string that is being read
        self._early: list[str] | None = None  # arguments that came before the name
        self._num_wrappers = 0  # objects around the present one
        self._value_end = ValueEnd()
        self._pieces: list[str] = []  # of arguments that are no object
        optional = "?" if self.separator_is_optional else ""
        self._next_object = re.compile(rf"\s{{0,99}}{re.escape(self.separator)}{optional}\s{{0,99}}(?=\{{)")
        self._next_beginning = re.compile(rf"\s{{0,99}}(?:{re.escape(self.separator)}\s{{0,99}})?")

    def _call(self, parsed: Parsed) -> bool:
        return self._object(parsed)

    def _object(self, parsed: Parsed) -> bool:
        self._state = self._object
        self._is_open, self._name, self._early, self._num_wrappers = False, "", None, 0
        begin = _BEGIN.match(self._held)
        if begin is None:
            return self._wait_or_leave(parsed, _BEGIN_BEGINNING)
        self._read(begin.end())
        self._state = self._member
        return True

    def _member(self, parsed: Parsed) -> bool:
        """A state: a member up to its value, or the object's end."""
        if end := _END.match(self._held):
            return self._end_object(parsed, end.end())
        member = _MEMBER.match(self._held)
        if member is None:
            return self._wait_or_leave(parsed, _MEMBER_BEGINNING)
        key, value = member[2], self._held[member.end()]
        if key in _ARGUMENTS and not self._is_open and self._early is None:
            self._read(member.end())
            if value == "{":
                self._begin_arguments(parsed)
            else:
                self._value_end, self._pieces, self._state = ValueEnd(), [], self._other_arguments
        elif key in ("name", "id", "type") and value in "\"'":
            self._read(member.end())
            self._key, self._state = key, self._string
        elif key == "function" and value == "{" and not self._is_open:
            self._read(member.end() + 1)
            self._num_wrappers += 1
        else:
            return self._leave(parsed)
        return True

    def _string(self, parsed: Parsed) -> bool:
        string = _STRING.match(self._held)
        if string is None:
            return self._wait_or_leave(parsed, _STRING_BEGINNING)
        self._read(string.end())
        self._state = self._member
        return self._set_name(parsed, string[0]) if self._key == "name" else True

    def _set_name(self, parsed: Parsed, string: str) -> bool:
        try:
            name = json.loads(repaired(string))
            name.encode()
        except ValueError:
            name = ""
        if not name or self._name:
            return self._leave(parsed)
        self._name = name
        if self._early is not None:
            self._open_call(parsed)
            self._emit_arguments(parsed, repaired("".join(self._early)))
        return True

    def _begin_arguments(self, parsed: Parsed) -> None:
        if self._name:
            self._open_call(parsed)
            self._state = self._arguments
        else:
            self._early = []
            self._state = self._early_arguments

    def _early_arguments(self, parsed: Parsed) -> bool:
        assert self._early is not None
        self._early.append(self._read(self._arguments_end.find(self._held)))
        if self._arguments_end.found:
            self._arguments_end = ObjectEnd()
            self._state = self._member
            return True
        return self._ended and self._leave(parsed)

    def _other_arguments(self, parsed: Parsed) -> bool:
        """A state: arguments that are no object, but null or the text of one."""
        self._pieces.append(self._read(self._value_end.find(self._held)))
        if not self._value_end.found:
            return self._ended and self._leave(parsed)
        arguments = _object_in("".join(self._pieces))
        if arguments is None:
            return self._leave(parsed)
        self._state = self._member
        if self._name:
            self._open_call(parsed)
            self._emit_arguments(parsed, arguments)
        else:
            self._early = [arguments]
        return True

    def _after_arguments(self, parsed: Parsed) -> bool:
        self._state = self._member
        return True

    def _open_call(self, parsed: Parsed) -> None:
        self._open(parsed, self._name)
        self._is_open = True

    def _end_object(self, parsed: Parsed, size: int) -> bool:
        if self._num_wrappers:
            self._num_wrappers -= 1
            self._read(size)
            return True
        if not self._is_open:
            if not self._name or not self.takes_name_alone:
                return self._leave(parsed)
            self._open_call(parsed)
            self._emit_arguments(parsed, "{}")
        self._take(size)
        self._unopened = ""
        self._state = self._between
        return True

    def _between(self, parsed: Parsed) -> bool:
        """A state: between two objects, or after the last one."""
        if not self.separator:
            return self._close()
        if found := self._next_object.match(self._held):
            self._read(found.end())
            self._state = self._object
            return True
        if self._next_beginning.fullmatch(self._held) and not self._ended:
            return False
        return self._close()

    def _wait_or_leave(self, parsed: Parsed, beginning: re.Pattern[str]) -> bool:
        return False if not self._ended and beginning.fullmatch(self._held) else self._leave(parsed)

    def _leave(self, parsed: Parsed) -> bool:
        """Ends a malformed object. A call that is open stays a call."""
        if not self._is_open:
            return self._no_call(parsed)
        self._held = self._unopened + self._held
        self._unopened = ""
        return self._close()


def _object_in(value: str) -> str | None:
    """Returns the arguments in a value that is not an object: those of a text, {} for null; None for others."""
    try:
        text = json.loads(repaired(value))
        written = repaired(text).strip() if text else "{}"
        return written if isinstance(json.loads(written), dict) else None
    except (ValueError, TypeError, RecursionError):
        return None
