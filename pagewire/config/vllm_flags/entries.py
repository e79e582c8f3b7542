"""The answer to a flag of vLLM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BECOMES = "becomes"  # another flag, or several
IGNORED = "ignored"  # without it, clients get the same answers
REFUSED = "refused"  # without it, something else would be served than the user asked for


@dataclass(frozen=True)
class VllmFlag:
    """A flag that vLLM has or had, and that Pagewire lacks or calls by another name."""

    name: str  # without its dashes
    verdict: str  # one of the three above
    why: str = ""  # for the user: what replaces it, or why nothing has to
    to: str = ""  # becomes: the field, or "profile"
    # becomes: a value -> its meaning here, by field; a value that is not listed is taken over.
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    convert: Callable[[str], str] | None = None  # becomes: converts a value; raises ValueError
    refused: Mapping[str, str] = field(default_factory=dict)  # becomes: values that are not served -> why
    harmless: tuple[str, ...] = ()  # refused: values that ask for what is served anyway
    takes: str = "value"  # or switch, words
    short: tuple[str, ...] = ()  # with their dash
