"""Rules of a grammar in llguidance's Lark, of which those are written that can come to an end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagewire.services.executor.grammar.schema.errors import wrong

_MAX_RULES = 50_000


@dataclass(frozen=True)
class Repeat:
    """A sequence from `least` to `most` times; most: None if there is no limit."""

    symbols: tuple[Symbol, ...]
    least: int
    most: int | None


# The name of a rule or a terminal, or a repetition.
Symbol = str | Repeat
Sequences = Sequence[tuple[Symbol, ...]]


class Rules:
    """Rules in the making. A rule is a choice of sequences, a terminal is an expression."""

    def __init__(self) -> None:
        self._rules: dict[str, Sequences] = {}
        self._given: dict[str, str] = {}  # names of what is written as it is, by expression
        self._num_names = 0

    def name(self) -> str:
        """Returns the name of a rule that `define` defines."""
        self._num_names += 1
        if self._num_names > _MAX_RULES:
            wrong("", "the schema needs too many rules; simplify it")
        return f"r{self._num_names}"

    def define(self, name: str, ways: Sequences) -> None:
        self._rules[name] = ways

    def add(self, ways: Sequences) -> str:
        name = self.name()
        self.define(name, ways)
        return name

    def terminal(self, expression: str) -> str:
        return self._given.setdefault(expression, f"T{len(self._given)}")

    def given(self, expression: str) -> str:
        """Returns the name of a rule that is written as it is, and comes to an end."""
        return self._given.setdefault(expression, f"g{len(self._given)}")

    def written(self, start: str) -> Iterable[str]:
        """Yields the lines of the grammar. Raises SchemaError if nothing matches it."""
        ending = self._ending()
        if start not in ending:
            wrong("", "nothing matches it")
        yield f"start: {start}"
        for name, ways in self._rules.items():
            if name in ending:
                kept = (way for way in ways if all(_ends(symbol, ending) for symbol in way))
                yield f"{name}: {' | '.join(dict.fromkeys(_joined(way, ending) for way in kept))}"
        for expression, name in self._given.items():
            yield f"{name}: {expression}"

    def _ending(self) -> set[str]:
        """The names of all that come to an end."""
        ending = set(self._given.values())
        users: dict[str, list[str]] = {}
        for name, ways in self._rules.items():
            for way in ways:
                for symbol in _names(way):
                    users.setdefault(symbol, []).append(name)
        pending = list(self._rules)
        while pending:
            name = pending.pop()
            if name in ending or not any(all(_ends(symbol, ending) for symbol in way) for way in self._rules[name]):
                continue
            ending.add(name)
            pending += users.get(name, ())
        return ending


def _names(symbols: Iterable[Symbol]) -> Iterable[str]:
    for symbol in symbols:
        if isinstance(symbol, Repeat):
            yield from _names(symbol.symbols)
        else:
            yield symbol


def _ends(symbol: Symbol, ending: set[str]) -> bool:
    if isinstance(symbol, Repeat):
        return symbol.least == 0 or all(_ends(one, ending) for one in symbol.symbols)
    return symbol in ending


def _joined(symbols: Iterable[Symbol], ending: set[str]) -> str:
    return " ".join(filter(None, (_text(symbol, ending) for symbol in symbols))) or '""'


def _text(symbol: Symbol, ending: set[str]) -> str:
    if not isinstance(symbol, Repeat):
        return symbol
    if symbol.most == 0 or not all(_ends(one, ending) for one in symbol.symbols):
        return ""
    joined = _joined(symbol.symbols, ending)
    if symbol.most is None:
        return f"({joined})*" if symbol.least == 0 else f"({joined}){{{symbol.least},}}"
    return f"({joined}){{{symbol.least},{symbol.most}}}"
