"""Finds the end of an object or a value that arrives in pieces, by counting the brackets outside of strings."""

import re
from typing import ClassVar

# Characters that matter inside a string, by its quote.
_INSIDE_STRINGS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


class _NestedEnd:
    # Characters that matter outside of strings, and those among them that end the value before them.
    _outside_strings: ClassVar[re.Pattern[str]]
    _ends_before: ClassVar[str] = ""

    def __init__(self) -> None:
        self.found = False
        self._depth = 0
        self._quote = ""  # that began the present string
        self._is_escaped = False  # the next character

    def find(self, piece: str) -> int:
        """Returns how many characters of the next piece belong to it."""
        at = 0
        while at < len(piece):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = (_INSIDE_STRINGS[self._quote] if self._quote else self._outside_strings).search(piece, at)
            if match is None:
                break
            if not self._quote and not self._depth and match[0] in self._ends_before:
                self.found = True
                return match.start()
            at = match.end()
            self._turn(match[0])
            if self.found:
                return at
        return len(piece)

    def _turn(self, char: str) -> None:
        if char == "\\":
            self._is_escaped = True
        elif char in "\"'":
            self._quote = "" if self._quote else char
        elif char in "{[(":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1


class ObjectEnd(_NestedEnd):
    """The end of a JSON object, valid or not: after the bracket that closes it."""

    _outside_strings = re.compile(r"""["'{}\[\]]""")

    def _turn(self, char: str) -> None:
        super()._turn(char)
        self.found = char in "}]" and not self._depth


class ValueEnd(_NestedEnd):
    """The end of an argument in Python: before the comma or the parenthesis that follows it."""

    _outside_strings = re.compile(r"""["'{}()\[\],]""")
    _ends_before = ",)]}"
