"""Regular expressions for the decimal numbers of a range, digit by digit."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def any_of(ways: Iterable[str]) -> str:
    """Returns an expression for any of these, which may be put into a sequence; "" among them makes it optional."""
    found = list(dict.fromkeys(ways))
    given = [way for way in found if way]
    if not given:
        return ""
    joined = given[0] if len(given) == 1 and len(given) == len(found) else f"(?:{'|'.join(given)})"
    return joined if len(given) == len(found) else f"{joined}?"


def between(low: str, high: str) -> str:
    """Returns an expression for strings of digits of one length, from `low` to `high`."""
    return _range(low, high, lambda num_rest: some_digits(num_rest, num_rest))


def fractions(low: str, high: str, least: int = 0) -> str:
    """Returns an expression for strings of `least` (0 or 1) to len(low) digits that are from `low` to `high` when zeros
    follow them."""
    found = _range(low, high, lambda num_rest: some_digits(0, num_rest), ends_early=True)
    return any_of(["", found]) if least == 0 and not low.strip("0") else found


def _range(low: str, high: str, rest: Callable[[int], str], *, ends_early: bool = False) -> str:
    """Alternatives side by side, not within each other, since expressions may be nested 250 deep only.

    rest: an expression for what follows a digit that decides. ends_early: zeros at the end may be left out.
    """
    length = len(low)
    same = next((index for index in range(length) if low[index] != high[index]), length)
    ways = [_with_zeros(low) if ends_early else low]
    if same < length:
        ways += [high[:num_digits] for num_digits in range(same + 1 if ends_early else length, length + 1)]
        if int(low[same]) + 1 < int(high[same]):
            middle = digit(int(low[same]) + 1, int(high[same]) - 1)
            ways.append(low[:same] + middle + rest(length - same - 1))
    for index in range(same + 1, length):
        if low[index] != "9":
            ways.append(low[:index] + digit(int(low[index]) + 1, 9) + rest(length - index - 1))
        if high[index] != "0":
            ways.append(high[:index] + digit(0, int(high[index]) - 1) + rest(length - index - 1))
    return any_of(ways)


def _with_zeros(text: str) -> str:
    """Returns an expression for digits, of which zeros at the end may be left out."""
    kept = text.rstrip("0")
    num_zeros = len(text) - len(kept)
    return f"{kept}0{{{0 if kept else 1},{num_zeros}}}" if num_zeros else kept


def integers(low: int, high: int) -> str:
    """Returns an expression for integers from `low` to `high`, neither negative, without leading zeros."""
    shortest, longest = len(str(low)), len(str(high))
    if shortest == longest:
        return between(str(low), str(high))
    ways = []
    if str(low) == "1".ljust(shortest, "0"):  # all numbers of so many digits
        shortest -= 1
    else:
        ways.append(between(str(low), "9" * shortest))
    if str(high) == "9" * longest:
        longest += 1
    else:
        ways.append(between("1" + "0" * (longest - 1), str(high)))
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


def digit(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def some_digits(least: int, most: int) -> str:
    if most == 0:
        return ""
    if least == most:
        return "[0-9]" if most == 1 else f"[0-9]{{{most}}}"
    return f"[0-9]{{{least},{most}}}"
