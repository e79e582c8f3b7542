"""Strings: what llguidance makes of patterns and formats, and the keys of objects."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from pagewire.services.executor.grammar.schema.engine_errors import is_too_complex, sentence
from pagewire.services.executor.grammar.schema.errors import SchemaError
from pagewire.services.executor.grammar.schema.exact_json import written

# Values of `format` that are checked; no other needs to be (JSON Schema 2020-12, validation, section 7.2.1).
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
# A character of a string in the one spelling that `exact_json.written` has for it.
CHARACTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(?:0[0-7be-f]|1[0-9a-f]|7f))'
# Of keys on which no schema says anything: a model that has begun one may never end it.
MAX_KEY_LENGTH = 128
PLAIN = r'[^"\\\x00-\x1f\x7f]'  # a character that is spelled as itself
_SPACES = "spaces, tabs, line feeds and carriage returns"
_ANY_SPACE = re.compile(r"((?<!\\)(?:\\\\)*)\\s")
_BYTES = LLTokenizer("byte")


@lru_cache(4096)
def why_refused(schema: str) -> str:
    """Returns why llguidance cannot follow a schema, in JSON; "" if it can."""
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return sentence(error) if error else ""


@lru_cache(4096)
def matches(key: str, value: str, text: str) -> bool:
    """Returns whether a text fulfils a `pattern` or a `format`."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", key: value}))
    matcher = LLMatcher(_BYTES, grammar, log_level=0)
    token_ids = list(written(text).encode())
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def whitespace(pattern: str, place: str) -> str:
    r"""Returns a regular expression for whitespace in JSON, in which \s means that of JSON.

    Raises SchemaError if it matches anything else.
    """
    if error := why_refused(json.dumps({"type": "string", "pattern": pattern})):
        raise SchemaError(place, error)
    if not pattern:
        return ""
    own = _ANY_SPACE.sub(r"\1[ \\t\\n\\r]", pattern)
    others = f"start: OTHER\nOTHER: /{regex_to_lark(own, '')}/ & /(?s:.+)/ & ~/[ \\t\\n\\r]*/"
    matcher = LLMatcher(_BYTES, LLMatcher.grammar_from_lark(others), log_level=0)
    matcher.compute_bitmask()
    if not matcher.is_error():
        raise SchemaError(place, f"it matches more than {_SPACES}, and nothing else may stand between values")
    if is_too_complex(matcher.get_error()):
        raise SchemaError(place, "it is too complex; simplify it")
    return own


def search_expression(pattern: str, place: str) -> str:
    """Returns a regular expression, in Lark, for whole keys that contain the pattern and are spelled as they are.

    Raises SchemaError if anchors are within the pattern.
    """
    ways = []
    for branch in _branches(pattern):
        begins, branch = branch.startswith("^"), branch.removeprefix("^")
        ends = branch.endswith("$") and not _is_escaped(branch, len(branch) - 1)
        branch = branch[: len(branch) - ends]
        if any(char in "^$" for _, char in _syntax(branch)):
            raise SchemaError(place, "a pattern of keys may have ^ at its beginning and $ at its end only")
        ways.append(f"{'' if begins else '(?s:.*)'}(?:{branch}){'' if ends else '(?s:.*)'}")
    return f"/(?:{regex_to_lark('|'.join(ways), 'dw')})/ & /{PLAIN}*/"


def _branches(pattern: str) -> list[str]:
    """The alternatives of a pattern."""
    branches, depth, start = [], 0, 0
    for index, char in _syntax(pattern):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            branches.append(pattern[start:index])
            start = index + 1
    return [*branches, pattern[start:]]


def _syntax(pattern: str) -> list[tuple[int, str]]:
    """The characters with their indices that are neither escaped nor in a class."""
    found, in_class, index = [], False, 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            index += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            index += pattern[index + 1 :].startswith("^")
            index += pattern[index + 1 :].startswith("]")
        else:
            found.append((index, char))
        index += 1
    return found


def _is_escaped(text: str, index: int) -> bool:
    before = text[:index]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
