"""Errors of llguidance in our own words: its messages speak of its internals and of the grammar that is made for it."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

NOTHING_MATCHES = "nothing matches it"
_TOO_COMPLEX = "it is too complex; give it fewer alternatives in one place, or fewer repetitions"
_TOO_DEEP = "it is nested too deeply; give its inner groups names of their own"
_COMPLEX = re.compile(r"too (many|big|large|complex)|TooComplex|has \d+ items|fuel|precomputation failed|limit", re.I)
_REGEX = re.compile(r"regex parse error.*?error: (?P<reason>[^\n]+)", re.S)
# Reasons that concern a client's own text, which name its parts.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_OWN = re.compile(r"^(Expected |Unexpected |unknown name|circular reference|Unknown common regex|Invalid type)", re.I)


def is_too_complex(error: str) -> bool:
    return _COMPLEX.search(error) is not None


def sentence(error: str, *, is_own_text: bool = False) -> str:
    """Returns what an error means for a client. is_own_text: lines and columns are those of the client's own text."""
    if found := _REGEX.search(error):
        return f"the regular expression is wrong: {found['reason'].strip()}"
    if "NoExtensionBias" in error or "Unsatisfiable" in error:
        return NOTHING_MATCHES
    if "deeply nested" in error or "recursion limit" in error or "nested too deep" in error:
        return _TOO_DEEP
    line = next((line.strip() for line in error.splitlines() if line.strip()), "")
    place, message = _PLACE.match(line), _PLACE.sub("", line).removeprefix("failed to compile JSON schema: ")
    if _OWN.match(message):
        message = re.sub(r" \(at \".*$", "", message)
        return f"line {place[1]}, column {place[2]}: {message}" if is_own_text and place else message
    if is_too_complex(error):
        return _TOO_COMPLEX
    logger.warning("a grammar was refused: %s", " ".join(error.split())[:1000])
    return "it cannot be compiled; the executor's log has the cause"
