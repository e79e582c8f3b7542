"""Objects as rules: properties in the schema's order, then those that it does not name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations

from pagewire.services.executor.grammar.schema.errors import wrong
from pagewire.services.executor.grammar.schema.exact_json import written
from pagewire.services.executor.grammar.schema.objects import is_closed, value_of, value_of_others
from pagewire.services.executor.grammar.schema.options import Options
from pagewire.services.executor.grammar.schema.rules import Repeat, Rules, Symbol
from pagewire.services.executor.grammar.schema.shapes import NOTHING, Intersections, Literal, Object, String, Union
from pagewire.services.executor.grammar.schema.texts import (
    CHARACTER,
    MAX_KEY_LENGTH,
    PLAIN,
    search_expression,
    why_refused,
)

_MAX_PATTERNS = 6  # of the keys of one object: each set of them that a key may match has a rule
_MAX_PROPERTIES = 1000  # of an object: each has a rule that refers to the next, which the engine follows on its stack
_MAX_STATES = 20_000  # of properties and how many have been written

Ways = list[tuple[Symbol, ...]]


@dataclass(frozen=True)
class _Pair:
    """A property that the schema names."""

    symbols: tuple[str, str, str]
    is_required: bool


class ObjectRules:
    """Makes the rules of objects."""

    def __init__(
        self,
        rules: Rules,
        intersections: Intersections,
        rule: Callable[[Union], str],
        string: Callable[[String], str | None],
        options: Options,
    ) -> None:
        """rule, string: return the names of rules."""
        self._rules = rules
        self._intersections = intersections
        self._rule = rule
        self._string = string
        self._options = options

    def ways(self, shape: Object) -> Ways:
        names = dict.fromkeys(name for clause in shape.clauses for name in clause.named)
        names |= dict.fromkeys(shape.required)
        names |= dict.fromkeys(str(one.value) for one in shape.names or () if isinstance(one, Literal))
        pairs = []
        for name in names:
            value = value_of(shape, name, self._intersections)
            if value == NOTHING and name in shape.required:
                return []
            if value != NOTHING and not self._is_undeclared(shape, name):
                key = self._rules.terminal(json.dumps(written(name)))
                symbols = (key, self._rules.terminal('":"'), self._rule(value))
                pairs.append(_Pair(symbols, name in shape.required))
        free = self._free_pair(shape, list(names))
        needed = shape.min_properties - len(pairs)
        if free and needed > 1 and not self._options.is_lenient:
            wrong(
                shape.place,
                f"minProperties: {needed} different properties besides those that it names cannot be guaranteed",
            )
        if self._options.is_lenient:
            shape = replace(shape, min_properties=min(shape.min_properties, len(pairs) + (free is not None)))
        inner = _Members(self._rules, pairs, free, shape).rule(0, 0)
        return [(self._rules.terminal('"{"'), inner, self._rules.terminal('"}"'))]

    def _is_undeclared(self, shape: Object, name: str) -> bool:
        """Returns whether only propertyNames mention it, in an object that is closed."""
        declared = name in shape.required or any(name in clause.named for clause in shape.clauses)
        return not declared and is_closed(shape, self._options.closes)

    # -- properties that the schema does not name ---------------------------------------------------------------------

    def _free_pair(self, shape: Object, taken: list[str]) -> str | None:
        """Returns the rule of a property; None if there is none."""
        patterns = list(dict.fromkeys(pattern for clause in shape.clauses for pattern, _ in clause.patterns))
        if len(patterns) > _MAX_PATTERNS:
            wrong(shape.place, f"patternProperties: at most {_MAX_PATTERNS} patterns are possible")
        ways: Ways = []
        for matched in _sets(patterns):
            value = value_of_others(shape, matched, self._intersections)
            if value == NOTHING or (not matched and is_closed(shape, self._options.closes)):
                continue
            for key in self._keys(shape, matched, [one for one in patterns if one not in matched], taken):
                ways.append((key, self._rules.terminal('":"'), self._rule(value)))
        return self._rules.add(ways) if ways else None

    def _keys(self, shape: Object, matched: tuple[str, ...], others: list[str], taken: list[str]) -> Iterable[str]:
        """Yields the symbols of keys that match exactly these patterns."""
        if len(matched) > 1 and why_refused(json.dumps({"allOf": [{"pattern": one} for one in matched]})):
            return
        for string in (String(max_length=MAX_KEY_LENGTH),) if shape.names is None else shape.names:
            if not isinstance(string, String):
                continue
            if not matched and not others and not taken:
                if (name := self._string(string)) is not None:
                    yield name
                continue
            if string.formats:
                wrong(shape.place, "propertyNames: format cannot be guaranteed beside named properties or patterns")
            yield self._rules.terminal(self._key(shape, string, matched, others, taken))

    def _key(self, shape: Object, string: String, matched: tuple[str, ...], others: list[str], taken: list[str]) -> str:
        """A key, each text of which has one spelling. Where patterns apply, it has no character that is escaped."""
        searched = (*matched, *string.patterns)
        character = PLAIN if searched or others else CHARACTER
        most = "" if string.max_length is None else string.max_length
        parts = [f"/{character}{{{string.min_length},{most}}}/"]
        parts += [self._rules.terminal(search_expression(pattern, shape.place)) for pattern in searched]
        parts += [f"~{self._rules.terminal(search_expression(pattern, shape.place))}" for pattern in others]
        if names := [*taken, *string.excluded]:
            excluded = " | ".join(json.dumps(written(name)[1:-1]) for name in names)
            parts.append(f"~{self._rules.terminal(excluded)}")
        return f'"\\"" ({" & ".join(parts)}) "\\""'


def _sets(patterns: list[str]) -> Iterable[tuple[str, ...]]:
    for size in range(len(patterns) + 1):
        yield from combinations(patterns, size)


class _Members:
    """The rules of what is between the braces, by how many named properties are decided on, and how many written."""

    def __init__(self, rules: Rules, pairs: list[_Pair], free: str | None, shape: Object) -> None:
        self._rules = rules
        self._pairs = pairs
        self._free = free
        self._least = shape.min_properties
        self._most = shape.max_properties
        self._place = shape.place
        self._made: dict[tuple[int, int], str] = {}
        self._counted = max(1, self._least) if self._most is None else len(pairs)  # more need not be told apart

    def rule(self, index: int, count: int) -> str:
        """Returns the rule of all that follows when `index` properties are decided on, and `count` written."""
        if (number := len(self._pairs)) > _MAX_PROPERTIES:
            wrong(self._place, f"the object has {number} properties; at most {_MAX_PROPERTIES} are possible")
        if (number + 1) * (min(number, self._counted) + 1) > 2 * _MAX_STATES:
            wrong(self._place, "minProperties and maxProperties need too many rules here; leave them out")
        for decided in range(len(self._pairs), index - 1, -1):
            for written_before in range(min(decided, self._counted) + 1):
                self._made[decided, written_before] = self._rules.add(self._ways(decided, written_before))
        return self._made[index, count]

    def _ways(self, index: int, count: int) -> Ways:
        if index == len(self._pairs):
            return self._tail(count)
        pair = self._pairs[index]
        ways: Ways = [] if pair.is_required else [(self._made[index + 1, count],)]
        if self._most is None or count < self._most:
            behind = self._made[index + 1, min(count + 1, self._counted)]
            ways.append((*self._comma(count), *pair.symbols, behind))
        return ways

    def _tail(self, count: int) -> Ways:
        least = max(0, self._least - count)
        most = None if self._most is None else self._most - count
        ways: Ways = [()] if least == 0 else []
        # Keys may repeat, so only one of several is sure to be another.
        if self._free is not None and least <= 1 and most != 0:
            comma = self._rules.terminal('","')
            again = Repeat((comma, self._free), 0, None if most is None else most - 1)
            ways.append((*self._comma(count), self._free, again))
        return ways

    def _comma(self, count: int) -> tuple[str, ...]:
        return (self._rules.terminal('","'),) if count else ()
