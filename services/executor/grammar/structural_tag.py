"""Translates structural tags, formats that are composed of text, tags and schemas, to llguidance's Lark.

The language is xgrammar's, which vLLM and SGLang take: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html.
A mark that is a single token may be written as that token or letter by letter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from pagewire.services.executor.grammar import gbnf
from pagewire.services.executor.grammar.errors import MAX_ERROR_LENGTH, GrammarError
from pagewire.services.executor.grammar.marks import Marks
from pagewire.services.executor.grammar.schema.errors import SchemaError
from pagewire.services.executor.grammar.schema.exact_json import parse
from pagewire.services.executor.grammar.schema.options import Options
from pagewire.services.executor.grammar.schema.writing import to_lark

Value = Mapping[str, Any]
# What follows a format: one of these texts; an empty sequence if the output ends there; None if it is not known.
End = Sequence[str] | None

_LEGACY = (
    'it must be {"type": "structural_tag", "format": {...}}, or {"triggers": [TEXT, ...], "structures": [{"begin": '
    'TEXT, "schema": SCHEMA, "end": TEXT}]}'
)
_KINDS = {str: "a text", bool: "a boolean", list: "a list", dict: "an object"}
_UNLIMITED = frozenset({"any_text", "triggered_tags"})


def from_structural_tag(text: str, marks: Marks, options: Options) -> str:
    """Returns a grammar for llguidance. options: of the JSON schemas in it. Raises GrammarError."""
    try:
        value = parse(text, "structural_tag")
        translation = _Translation(marks, options)
        if isinstance(value, dict) and "format" in value:
            start = translation.format(value["format"], "#/format", ())
        else:
            start = translation.format(_from_legacy(value), "#", ())
        return translation.grammar(start)
    except SchemaError as error:
        raise GrammarError(error.message) from error
    except RecursionError as error:
        raise GrammarError("structural_tag: it is nested too deeply") from error


def _from_legacy(value: Any) -> Value:
    try:
        tags = [
            {"begin": tag["begin"], "content": {"type": "json_schema", "json_schema": tag["schema"]}, "end": tag["end"]}
            for tag in value["structures"]
        ]
        return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}
    except (KeyError, TypeError) as error:
        raise GrammarError(f"structural_tag: {_LEGACY}") from error


class _Translation:
    """Rules of one grammar. Each kind of format has a method that returns an expression for it, its end included."""

    def __init__(self, marks: Marks, options: Options) -> None:
        self._marks = marks
        self._options = options
        self._rules: list[str] = []
        self._others: dict[str, dict[str, Any]] = {}  # grammars that rules name, by content
        self._num_names = 0
        self._formats = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
        }

    def grammar(self, start: str) -> str:
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._others.values()]})

    def format(self, value: Any, where: str, end: End) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        translate = self._formats.get(kind) if isinstance(kind, str) else None
        if translate is None:
            known = ", ".join(self._formats)
            raise _wrong(where, f"a format's type must be one of {known}, not {kind!r:.50}")
        if kind in _UNLIMITED and end is None:
            raise _wrong(where, f"{kind} has no end; put it last, or in a tag with an end that is not empty")
        return translate(value, where, end)

    # -- what is limited ---------------------------------------------------------------------------------------------

    def _const_string(self, value: Value, where: str, end: End) -> str:
        return self._ended(self._literal(_text(value, "value", where)), end)

    def _json_schema(self, value: Value, where: str, end: End) -> str:
        if value.get("style", "json") != "json":
            raise _wrong(f"{where}/style", f"only 'json' is possible, not {value['style']!r:.50}")
        schema = _member(value, "json_schema", where, (dict, bool))
        try:
            lark = to_lark(schema, self._options)
        except SchemaError as error:
            raise _wrong(f"{where}/json_schema{error.place}", error.message[:MAX_ERROR_LENGTH]) from error
        return self._ended(self._other({"lark_grammar": lark}), end)

    def _regex(self, value: Value, where: str, end: End) -> str:
        lark = json.loads(LLMatcher.grammar_from_regex(_text(value, "pattern", where)))
        return self._ended(self._other(lark["grammars"][0]), end)

    def _grammar(self, value: Value, where: str, end: End) -> str:
        text = _text(value, "grammar", where)
        try:
            lark = gbnf.to_lark(text)
        except GrammarError as error:
            raise _wrong(where, str(error)[:MAX_ERROR_LENGTH]) from error
        return self._ended(self._other({"lark_grammar": lark}), end)

    def _repeated(self, value: Value, where: str, end: End) -> str:
        content = self.format(_member(value, "content", where, dict), f"{where}/content", None)
        return self._ended(f"({content}){ {'optional': '?', 'star': '*', 'plus': '+'}[value['type']] }", end)

    def _tags_with_separator(self, value: Value, where: str, end: End) -> str:
        tags = self._rule(" | ".join(self._tags(value, where)))
        if value.get("stop_after_first"):
            tags_of_all = tags
        else:
            tags_of_all = f"{tags} ({self._literal(_text(value, 'separator', where))} {tags})*"
        return self._ended(tags_of_all if value.get("at_least_one") else f"({tags_of_all})?", end)

    # -- what is composed --------------------------------------------------------------------------------------------

    def _sequence(self, value: Value, where: str, end: End) -> str:
        elements = _some(value, "elements", where)
        last = len(elements) - 1
        parts = [
            self.format(element, f"{where}/elements/{index}", end if index == last else None)
            for index, element in enumerate(elements)
        ]
        return " ".join(parts)

    def _or(self, value: Value, where: str, end: End) -> str:
        elements = enumerate(_some(value, "elements", where))
        return self._rule(" | ".join(self.format(one, f"{where}/elements/{index}", end) for index, one in elements))

    def _tag(self, value: Value, where: str, end: End) -> str:
        return f"{self._literal(_text(value, 'begin', where))} {self._behind_begin(value, where, end)}"

    def _behind_begin(self, tag: Value, where: str, end: End) -> str:
        """The content and the end of a tag."""
        own = _member(tag, "end", where, (str, list))
        ends = own if isinstance(own, list) else [own]
        if not ends or not all(isinstance(text, str) for text in ends):
            raise _wrong(f"{where}/end", "must be a text, or several")
        content, place = _member(tag, "content", where, dict), f"{where}/content"
        given = [text for text in map(self._marks.before_end, ends) if text]
        ways = [self._ended(self.format(content, place, given), end)] if given else []
        if len(given) < len(ends):
            ways.append(self.format(content, place, end))
        return self._rule(" | ".join(ways))

    def _tags(self, value: Value, where: str) -> list[str]:
        """A sequence of formats."""
        tags = enumerate(_some(value, "tags", where))
        return [self._tag(tag, f"{where}/tags/{index}", None) for index, tag in tags]

    # -- free text ---------------------------------------------------------------------------------------------------

    def _any_text(self, value: Value, where: str, end: End) -> str:
        return self._free({}, _texts(value, "excludes", where), end or ())

    def _triggered_tags(self, value: Value, where: str, end: End) -> str:
        triggers = _texts(value, "triggers", where)
        if not triggers or "" in triggers:
            raise _wrong(f"{where}/triggers", "at least one is needed, and none may be empty")
        behind: dict[str, list[str]] = {}
        for index, tag in enumerate(_some(value, "tags", where)):
            place = f"{where}/tags/{index}"
            begin = _text(tag, "begin", place)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise _wrong(f"{place}/begin", "it begins with none of the triggers")
            rest = f"{self._literal(begin.removeprefix(trigger))} {self._behind_begin(tag, place, None)}"
            behind.setdefault(trigger, []).append(rest)
        again = self._rule("")  # what follows a tag
        stops = {trigger: f"{self._rule(' | '.join(rests))} {again}" for trigger, rests in behind.items()}
        excludes = [*_texts(value, "excludes", where), *(one for one in triggers if one not in behind)]
        text = self._free(stops, excludes, end or ())
        self._set_rule(again, self._ended('""', end) if value.get("stop_after_first") else text)
        if not value.get("at_least_one"):
            return text
        return self._rule(" | ".join(f"{self._literal(trigger)} {rest}" for trigger, rest in stops.items()))

    def _free(self, stops: Mapping[str, str], excludes: Iterable[str], end: Sequence[str]) -> str:
        """Text up to the first of the stops and what follows that stop; or text up to the end, possibly the output's.

        Lexemes are greedy, so text and the stop behind it are one lexeme, which ends as early as possible.
        """
        stops = {**stops, **dict.fromkeys(end, "")}
        excludes = list(excludes)
        name = self._name()
        no, text, up_to, before = (f"{kind}_{name.upper()}" for kind in ("NO", "TEXT", "UP_TO", "BEFORE"))
        without = f" & ~{no}" if excludes else ""
        if excludes:
            self._rules.append(f"{no}: /(?s:.*)/ ({' | '.join(map(json.dumps, excludes))}) /(?s:.*)/")
        self._rules.append(f"{text}: /(?s:.+)/{without}")
        ways = [] if end else [f"{text}?"]
        for number, (stop, rest) in enumerate(stops.items()):
            self._rules.append(f"{up_to}_{number}: /(?s:.*)/{without} {json.dumps(stop)}")
            self._rules.append(f"{name}_{number}[lazy]: {up_to}_{number}")
            ways.append(f"{name}_{number} {rest}")
            first, *marked = self._marks.split(stop)
            if isinstance(first, int):
                ways.append(f"{text}? {self._marks.written([first, *marked], by_token=True)} {rest}")
            elif marked:
                self._rules.append(f"{before}_{number}: /(?s:.*)/{without} {json.dumps(first)}")
                ways.append(f"{before}_{number} {self._marks.written(marked, by_token=True)} {rest}")
        others = self._marks.besides([*stops, *excludes])
        self._rules.append(f"{name}: {f'({text}? {others})* ' if others else ''}({' | '.join(ways)})")
        return name

    # -- rules -------------------------------------------------------------------------------------------------------

    def _literal(self, text: str) -> str:
        return self._marks.written(self._marks.split(self._marks.before_end(text)))

    def _ended(self, expression: str, end: End) -> str:
        if not end:
            return expression
        return f"({expression}) ({' | '.join(self._literal(text) for text in end)})"

    def _other(self, grammar: dict[str, Any]) -> str:
        """One grammar for all that are equal."""
        key = json.dumps(grammar)
        if key not in self._others:
            self._others[key] = {**grammar, "name": self._name()}
        return f"@{self._others[key]['name']}"

    def _rule(self, expression: str) -> str:
        name = self._name()
        self._rules.append(f"{name}: {expression}")
        return name

    def _set_rule(self, name: str, expression: str) -> None:
        self._rules[self._rules.index(f"{name}: ")] = f"{name}: {expression}"

    def _name(self) -> str:
        self._num_names += 1
        return f"f{self._num_names}"


def _wrong(where: str, message: str) -> GrammarError:
    return GrammarError(f"structural_tag at {where}: {message}")


def _member(value: Any, key: str, where: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get(key), kind):
        kinds = " or ".join(_KINDS[one] for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise _wrong(where, f"{key} is needed, {kinds}")
    return value[key]


def _some(value: Any, key: str, where: str) -> list[Any]:
    items: list[Any] = _member(value, key, where, list)
    if not items:
        raise _wrong(f"{where}/{key}", "at least one is needed")
    return items


def _text(value: Any, key: str, where: str) -> str:
    text: str = _member(value, key, where, str)
    return text


def _texts(value: Value, key: str, where: str) -> list[str]:
    texts = value.get(key) or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _wrong(f"{where}/{key}", "must be a list of texts")
    return texts
