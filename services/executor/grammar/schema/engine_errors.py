"""Errors of llguidance in our own words: its messages speak of its internals and of the grammar that is made for it."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

NOTHING_MATCHES = "nothing matches it"
FEWER = "give it fewer alternatives in one place, or fewer repetitions"
_TOO_COMPLEX = f"it is too complex; {FEWER}"
_TOO_DEEP = "it is nested too deeply; nest it less deeply"
_DEEP_GROUPS = "it is nested too deeply; give its inner groups names of their own"
_DEEP = re.compile(r"too deeply nested|nested too deep|recursion (?:limit|depth) exceeded", re.I)
_COMPLEX = re.compile(
    r"too many (?:expressions constructed|items \(|states: )|\) too big \(limit|schema too large|DNF too large|"
    r"(?:Parser|Lexer)TooComplex|\d items; max is|fuel exhausted|relevance check fuel|precomputation failed|"
    r"assertion failed: grammar\.symbols\.len",
    re.I,
)
_REGEX = re.compile(r"regex parse error.*?error: (?P<reason>[^\n]+)", re.S)
# Errors that name parts of the client's own text.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_OWN = re.compile(
    r"^(Expect(?:ed|ing) |Unexpected |unknown (?:name|token|grammar|special token|common regex)|circular reference|"
    r"Invalid type|Pointer |Value for |range end )",
    re.I,
)


def is_too_complex(error: str) -> bool:
    return _COMPLEX.search(_first_line(error)) is not None


def sentence(error: str, form: str = "json_schema", *, is_own_text: bool = False) -> str:
    """Returns what an error means for a client. form: of the grammar. is_own_text: lines and columns are those of the
    client's own text."""
    if found := _REGEX.search(error):
        return f"the regular expression is wrong: {found['reason'].strip()}"
    if "NoExtensionBias" in error or "Unsatisfiable" in error:
        return NOTHING_MATCHES
    line = _first_line(error)
    place, message = _PLACE.match(line), _PLACE.sub("", line).removeprefix("failed to compile JSON schema: ")
    if _OWN.match(message):
        message = re.sub(r"(?: \(at \"|; following special).*$", "", message)
        return f"line {place[1]}, column {place[2]}: {message}" if is_own_text and place else message
    if _DEEP.search(line):
        return _DEEP_GROUPS if form == "ebnf" else _TOO_DEEP
    if is_too_complex(error):
        return _TOO_COMPLEX
    logger.warning("a grammar was refused: %s", " ".join(error.split())[:1000])
    return "it cannot be compiled; the executor's log has the cause"


def _first_line(error: str) -> str:
    """Returns what is wrong; the lines after it quote the grammar."""
    return next((line.strip() for line in error.splitlines() if line.strip()), "")
