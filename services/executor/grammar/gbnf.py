"""Translates GBNF, the language of llama.cpp's grammars, to llguidance's Lark.

The language: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from pagewire.services.executor.grammar.errors import GrammarError

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_TIMES = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_MAX_DEPTH = 27  # of groups: llguidance takes no more; where groups are repeated, it takes half as many
_MAX_TIMES = 100_000
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")


def to_lark(text: str) -> str:
    """Returns a grammar, in GBNF or Lark, as Lark. Raises GrammarError."""
    return text if is_lark(text) else _Translation(text).lark()


def is_lark(text: str) -> bool:
    return _LARK.search(text) is not None


@dataclass
class _Rule:
    expression: str
    uses: set[str] = field(default_factory=set)


class _Translation:
    """Reads from left to right. An expression is a rule's, or a terminal's if all in it are terminals: as one lexeme,
    characters cost far less than as lexemes of their own."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: dict[str, _Rule] = {}
        self._uses: set[str] = set()

    def lark(self) -> str:
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            self._rule()
            self._skip(_SPACE_AND_LINES)
        if "root" not in self._rules:
            raise GrammarError("there is no rule 'root'")
        for name, rule in self._rules.items():
            if missing := rule.uses - self._rules.keys():
                raise GrammarError(f"rule {name!r} uses {min(missing)!r}, which is not defined")
        names = self._names()
        lines = ["%llguidance {}", f"start: {names['root']}"]
        for name, rule in self._rules.items():
            expression = re.sub(r"\0([a-zA-Z0-9_-]+)\0", lambda found: names[found[1]], rule.expression)
            lines.append(f"{names[name]}: {expression}")
        return "\n".join(lines)

    def _names(self) -> Mapping[str, str]:
        """Names in Lark: two names of GBNF may differ in ways that a name of Lark cannot have."""
        users: dict[str, set[str]] = {}
        for name, rule in self._rules.items():
            for used in rule.uses:
                users.setdefault(used, set()).add(name)
        num_open = {name: len(rule.uses) for name, rule in self._rules.items()}
        terminals, pending = set(), [name for name, count in num_open.items() if count == 0]
        while pending:
            name = pending.pop()
            terminals.add(name)
            for user in users.get(name, ()):
                num_open[user] -= 1
                if num_open[user] == 0:
                    pending.append(user)
        numbered = enumerate(self._rules)
        return {name: f"{'T' if name in terminals else 'r'}{index}" for index, name in numbered}

    # -- parts of the language ----------------------------------------------------------------------------------------

    def _rule(self) -> None:
        name = self._match(_NAME, "the name of a rule")
        self._skip(_SPACE)
        if not self._text.startswith("::=", self._at):
            self._fail("expected ::=")
        self._at += 3
        self._skip(_SPACE_AND_LINES)
        if name in self._rules:
            self._fail(f"rule {name!r} is defined twice")
        self._uses = set()
        self._rules[name] = _Rule(self._choice(0), self._uses)
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            self._fail("expected the end of the rule")

    def _choice(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            self._fail(f"groups are nested more than {_MAX_DEPTH} deep; name inner ones as rules")
        ways = [self._sequence(depth)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            ways.append(self._sequence(depth))
        return " | ".join(ways)

    def _sequence(self, depth: int) -> str:
        """A sequence ends with the line, unless it is in a group. Lines that begin with | go on with the choice."""
        parts = []
        while (part := self._item(depth)) is not None:
            self._skip(_SPACE_AND_LINES if depth else _SPACE)
            parts.append(self._repeated(part, depth))
        self._skip_to_choice()
        return " ".join(parts) or '""'

    def _skip_to_choice(self) -> None:
        found = _SPACE_AND_LINES.match(self._text, self._at)
        if found is not None and self._text.startswith("|", found.end()):
            self._at = found.end()

    def _item(self, depth: int) -> str | None:
        char = self._text[self._at : self._at + 1]
        if char == '"':
            return json.dumps(self._literal())
        if char == "[":
            return f"/{self._class()}/"
        if char == ".":
            self._at += 1
            return "/(?s:.)/"
        if char == "(":
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            inner = self._choice(depth + 1)
            if not self._text.startswith(")", self._at):
                self._fail("expected )")
            self._at += 1
            return f"({inner})"
        if char and _NAME.match(char):
            name = self._match(_NAME, "a name")
            self._uses.add(name)
            return f"\0{name}\0"
        return None

    def _repeated(self, part: str, depth: int) -> str:
        while self._at < len(self._text):
            char = self._text[self._at]
            if char not in "*+?{":
                break
            group = part if part.startswith("(") and part.endswith(")") else f"({part})"
            if char == "{":
                part = f"{group}{self._times()}"
            else:
                part, self._at = f"{group}{char}", self._at + 1
            self._skip(_SPACE_AND_LINES if depth else _SPACE)
        return part

    def _times(self) -> str:
        found = _TIMES.match(self._text, self._at)
        if found is None:
            self._fail("expected {least}, {least,} or {least,most}")
        least, comma, most = found.groups()
        if max(len(least), len(most or "")) > 9 or max(int(least), int(most or 0)) > _MAX_TIMES:
            self._fail(f"at most {_MAX_TIMES} repetitions are possible")
        if most and int(most) < int(least):
            self._fail("a repetition has fewer times at most than at least")
        self._at = found.end()
        return f"{{{int(least)}{comma or ''}{most or ''}}}"

    def _literal(self) -> str:
        self._at += 1
        chars = []
        while not self._text.startswith('"', self._at):
            chars.append(self._char('"'))
        self._at += 1
        return "".join(chars)

    def _class(self) -> str:
        """A class of characters. In Lark each of them is written by its number, so that none has a meaning."""
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        ranges = []
        while not self._text.startswith("]", self._at):
            first = last = self._char("]")
            if self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1):
                self._at += 1
                last = self._char("]")
            if last < first:
                self._fail(f"the range {first!r} to {last!r} of a class is empty")
            ranges.append(f"\\x{{{ord(first):X}}}-\\x{{{ord(last):X}}}")
        self._at += 1
        if not ranges:
            return "(?s:.)" if is_negated else "[^\\x{0}-\\x{10FFFF}]"
        return f"[{'^' if is_negated else ''}{''.join(ranges)}]"

    def _char(self, end: str) -> str:
        """One character, escaped or not."""
        if self._at >= len(self._text):
            self._fail(f"expected {end}")
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[kind]]
            if len(digits) < _HEX_DIGITS[kind] or not re.fullmatch("[0-9a-fA-F]+", digits):
                self._fail(f"\\{kind} needs {_HEX_DIGITS[kind]} hexadecimal digits")
            self._at += len(digits)
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                self._fail(f"\\{kind}{digits} is no character of Unicode")
            return chr(code)
        if not kind or kind not in _ESCAPES:
            self._fail(f"the escape \\{kind} is unknown")
        return _ESCAPES[kind]

    # -- the text -----------------------------------------------------------------------------------------------------

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if (found := pattern.match(self._text, self._at)) is not None:
            self._at = found.end()

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            self._fail(f"expected {what}")
        self._at = found.end()
        return found[0]

    def _fail(self, message: str) -> NoReturn:
        before = self._text[: self._at]
        line, column = before.count("\n") + 1, self._at - (before.rfind("\n") + 1) + 1
        raise GrammarError(f"line {line}, column {column}: {message}")
