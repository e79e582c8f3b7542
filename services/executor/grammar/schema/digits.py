"""Regular expressions for the decimal numbers of a range, digit by digit."""

from __future__ import annotations

from collections.abc import Iterable


def any_of(ways: Iterable[str]) -> str:
    """Returns an expression for any of these, which may be put into a sequence; "" among them makes it optional."""
    found = list(dict.fromkeys(ways))
    given = [way for way in found if way]
    if not given:
        return ""
    joined = given[0] if len(given) == 1 and len(given) == len(found) else f"(?:{'|'.join(given)})"
    return joined if len(given) == len(found) else f"{joined}?"


def between(low: str, high: str) -> str:
    """Strings of digits of one length, from `low` to `high`."""
    if low == high:
        return low
    if low[0] == high[0]:
        return low[0] + between(low[1:], high[1:])
    first, last, num_rest = int(low[0]), int(high[0]), len(low) - 1
    ways = []
    if low[1:].strip("0"):
        ways.append(low[0] + between(low[1:], "9" * num_rest))
        first += 1
    if high[1:].strip("9"):
        ways.append(high[0] + between("0" * num_rest, high[1:]))
        last -= 1
    if first <= last:
        ways.append(digit(first, last) + some_digits(num_rest, num_rest))
    return any_of(ways)


def integers(low: int, high: int) -> str:
    """Integers from `low` to `high`, neither negative, without leading zeros."""
    shortest, longest = len(str(low)), len(str(high))
    if shortest == longest:
        return between(str(low), str(high))
    ways = [between(str(low), "9" * shortest), between("1" + "0" * (longest - 1), str(high))]
    if shortest + 1 < longest:
        ways.append(f"[1-9]{some_digits(shortest, longest - 2)}")
    return any_of(ways)


def signed_integers(low: int, high: int) -> str:
    ways = []
    if low < 0:
        ways.append(f"-{integers(max(1, -high), -low)}")
    if high >= 0:
        ways.append(integers(max(0, low), high))
    return any_of(ways)


def fractions(low: str, high: str, least: int = 0) -> str:
    """Strings of `least` (0 or 1) to len(low) digits that are from `low` to `high` when zeros follow them."""
    num_digits = len(low)
    if not low.strip("0") and not high.strip("9"):
        return some_digits(least, num_digits)
    ways = [] if least or low.strip("0") else [""]
    if low[0] == high[0]:
        ways.append(low[0] + fractions(low[1:], high[1:]))
        return any_of(ways)
    first, last = int(low[0]), int(high[0])
    if low[1:].strip("0"):
        ways.append(low[0] + fractions(low[1:], "9" * (num_digits - 1)))
        first += 1
    if high[1:].strip("9"):
        ways.append(high[0] + fractions("0" * (num_digits - 1), high[1:]))
        last -= 1
    if first <= last:
        ways.append(digit(first, last) + some_digits(0, num_digits - 1))
    return any_of(ways)


def digit(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def some_digits(least: int, most: int) -> str:
    if most == 0:
        return ""
    if least == most:
        return "[0-9]" if most == 1 else f"[0-9]{{{most}}}"
    return f"[0-9]{{{least},{most}}}"
