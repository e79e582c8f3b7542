"""What an answer to a flag of vLLM's is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BECOMES = "becomes"  # another flag, or several
IGNORED = "ignored"  # leaving it out gives the same answers to clients
REFUSED = "refused"  # leaving it out would serve something else than was asked for


@dataclass(frozen=True)
class Legacy:
    """A flag that vLLM has or had and Pagewire has not, or not by that name."""

    name: str  # without its dashes
    verdict: str  # one of the three above
    why: str = ""  # what took its place, or why nothing had to
    to: str = ""  # becomes: the field that it is here, or "profile"
    # becomes: its value -> what that means here, by field; values that are not listed pass as they are.
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    convert: Callable[[str], str] | None = None  # becomes: the value there from the value here; raises ValueError
    harmless: tuple[str, ...] = ()  # refused: values that ask for what is so anyway
    takes: str = "value"  # or switch, words
    short: tuple[str, ...] = ()  # with their dash


def becomes(
    name: str,
    to: str,
    why: str = "",
    *,
    values: Mapping[str, Mapping[str, str]] | None = None,
    convert: Callable[[str], str] | None = None,
    takes: str = "value",
    short: tuple[str, ...] = (),
) -> Legacy:
    return Legacy(name, BECOMES, why, to, values or {}, convert, takes=takes, short=short)


def ignored(why: str, *names: str, takes: str = "value", short: tuple[str, ...] = ()) -> list[Legacy]:
    """Several that have the same answer."""
    return [Legacy(name, IGNORED, why, takes=takes, short=short) for name in names]


def refused(
    why: str, *names: str, harmless: tuple[str, ...] = (), takes: str = "value", short: tuple[str, ...] = ()
) -> list[Legacy]:
    """Several that have the same answer."""
    return [Legacy(name, REFUSED, why, harmless=harmless, takes=takes, short=short) for name in names]
