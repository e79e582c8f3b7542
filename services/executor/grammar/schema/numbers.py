"""The numbers that a schema allows, and a regular expression for them.

Clients read what has a point or an exponent as a double, and compare that. So between two doubles nothing is written
that would be rounded across a bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from pagewire.services.executor.grammar.schema.digits import any_of, fractions, integers, signed_integers, some_digits

# Without a bound, a model that writes digits may never stop. 20 digits have all 64-bit integers, and a fraction of 20
# digits all doubles that are written without an exponent.
MOST_DIGITS = 20
_LEAST = Decimal("5e-324")  # the least double that is positive
_MOST = Decimal("1.7976931348623157e308")


@dataclass(frozen=True)
class Bound:
    value: Fraction
    is_exclusive: bool


@dataclass(frozen=True)
class Number:
    """Numbers of a range: integers, or all; multiples of a number, or all."""

    integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    multiple_of: Fraction | None = None

    def admits(self, value: Fraction) -> bool:
        if self.integer and value.denominator != 1:
            return False
        if self.multiple_of is not None and (value / self.multiple_of).denominator != 1:
            return False
        if self.low is not None and (value < self.low.value or (self.low.is_exclusive and value == self.low.value)):
            return False
        return self.high is None or not (
            value > self.high.value or (self.high.is_exclusive and value == self.high.value)
        )

    def and_also(self, other: Number) -> Number:
        lows = [bound for bound in (self.low, other.low) if bound is not None]
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        return Number(
            integer=self.integer or other.integer,
            low=max(lows, key=lambda bound: (bound.value, bound.is_exclusive), default=None),
            high=min(highs, key=lambda bound: (bound.value, not bound.is_exclusive), default=None),
            multiple_of=common_multiple(self.multiple_of, other.multiple_of),
        )

    def is_empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        if (step := common_multiple(self.multiple_of, Fraction(1) if self.integer else None)) is not None:
            first, last = math.ceil(self.low.value / step), math.floor(self.high.value / step)
            first += self.low.is_exclusive and first * step == self.low.value
            last -= self.high.is_exclusive and last * step == self.high.value
            return first > last
        is_exclusive = self.low.is_exclusive or self.high.is_exclusive
        return self.low.value > self.high.value or (is_exclusive and self.low.value == self.high.value)

    def integers(self) -> tuple[int, int]:
        """Returns the least and the greatest integer that are written; none is if the first is greater."""
        low = high = None
        if self.low is not None:
            low = math.ceil(self.low.value) + (self.low.is_exclusive and self.low.value.denominator == 1)
        if self.high is not None:
            high = math.floor(self.high.value) - (self.high.is_exclusive and self.high.value.denominator == 1)
        most = 10 ** max(MOST_DIGITS, *(len(str(abs(end or 0))) + 1 for end in (low, high))) - 1
        if low is None or high is None:
            most = most if low or high else 10**MOST_DIGITS - 1
        return -most if low is None else low, most if high is None else high


def common_multiple(one: Fraction | None, other: Fraction | None) -> Fraction | None:
    if one is None or other is None:
        return one or other
    denominator = math.lcm(one.denominator, other.denominator)
    numerators = (value.numerator * (denominator // value.denominator) for value in (one, other))
    return Fraction(math.lcm(*numerators), denominator)


# -- all numbers of a range -------------------------------------------------------------------------------------------


def expression(number: Number) -> str:
    """Returns a regular expression for numbers that may be any multiple; "" if there are none."""
    low, high = number.integers()
    if not number.integer:  # longer ones have an exponent
        low, high = max(low, -(10**MOST_DIGITS) + 1), min(high, 10**MOST_DIGITS - 1)
    ways = [signed_integers(low, high)] if low <= high else []
    if not number.integer:
        least, most = _doubles(number)
        if least is not None and most is not None and least <= most:
            ways += _with_point_or_exponent(least, most)
    return any_of(ways)


def _doubles(number: Number) -> tuple[Decimal | None, Decimal | None]:
    """Returns the least and the greatest double of the range, in the fewest digits that mean it."""
    least = -_MOST if number.low is None else _double_from(number.low)
    negated = None if number.high is None else Bound(-number.high.value, number.high.is_exclusive)
    most = -_MOST if negated is None else _double_from(negated)
    return least, None if most is None else -most


def _double_from(bound: Bound) -> Decimal | None:
    """Returns the least double within a lower bound."""
    try:
        double = float(bound.value)
    except OverflowError:
        double = math.inf if bound.value > 0 else -math.inf
    if double == -math.inf:
        return -_MOST
    if double == math.inf:
        return None
    if Fraction(double) < bound.value or (bound.is_exclusive and Fraction(double) == bound.value):
        double = math.nextafter(double, math.inf)
    return None if double == math.inf else Decimal(repr(double))


def _with_point_or_exponent(low: Decimal, high: Decimal) -> list[str]:
    ways = []
    if low <= 0 <= high:
        ways.append(rf"-?0(?:\.0{{1,{MOST_DIGITS}}}(?:[eE][+-]?[0-9]{{1,2}})?|[eE][+-]?[0-9]{{1,2}})")
    if high > 0:
        ways += _positive(max(low, _LEAST), high)
    if low < 0:
        ways += [f"-{way}" for way in _positive(max(-high, _LEAST), -low)]
    return ways


def _positive(low: Decimal, high: Decimal) -> list[str]:
    return [way for way in (_with_point(Fraction(low), Fraction(high)), _with_exponent(low, high)) if way]


def _with_point(low: Fraction, high: Fraction) -> str:
    """Numbers with a fraction, both ends positive."""
    scale = 10**MOST_DIGITS
    first, last = math.ceil(low * scale), math.floor(min(high, Fraction(scale) - Fraction(1, scale)) * scale)
    if first > last:
        return ""
    (first_whole, first_part), (last_whole, last_part) = divmod(first, scale), divmod(last, scale)
    parts = f"{first_part:0{MOST_DIGITS}}", f"{last_part:0{MOST_DIGITS}}"
    return _between(first_whole, last_whole, parts, needs_point=True)


def _between(first: int, last: int, parts: tuple[str, str], *, needs_point: bool) -> str:
    """Numbers from `first` with the first of the parts behind its point, to `last` with the second.

    parts: MOST_DIGITS digits each. needs_point: a part of zeros is written, too.
    """
    zeros, nines = "0" * MOST_DIGITS, "9" * MOST_DIGITS

    def part(least: str, most: str) -> str:
        is_any = (least, most) == (zeros, nines)
        found = rf"\.{some_digits(1, MOST_DIGITS) if is_any else fractions(least, most, 1)}"
        return found if needs_point or least != zeros else f"(?:{found})?"

    if first == last:
        return f"{first}{part(*parts)}"
    ways = []
    if parts[0] != zeros:
        ways.append(f"{first}{part(parts[0], nines)}")
        first += 1
    if parts[1] != nines:
        ways.append(f"{last}{part(zeros, parts[1])}")
        last -= 1
    if first <= last:
        ways.append(f"{integers(first, last)}{part(zeros, nines)}")
    return any_of(ways)


def _with_exponent(low: Decimal, high: Decimal) -> str:
    """Numbers of one digit, a fraction or none, and an exponent; both ends positive."""
    first, last = low.adjusted(), high.adjusted()
    least, most = _mantissa(low, upwards=True), _mantissa(high, upwards=False)
    if first == last:
        return f"{_mantissas(least, most)}[eE]{_exponents(first, last)}" if least <= most else ""
    ways = [
        f"{_mantissas(least, 10 ** (MOST_DIGITS + 1) - 1)}[eE]{_exponents(first, first)}",
        f"{_mantissas(10**MOST_DIGITS, most)}[eE]{_exponents(last, last)}",
    ]
    if first + 1 < last:
        ways.append(rf"[1-9](?:\.[0-9]{{1,{MOST_DIGITS}}})?[eE]{_exponents(first + 1, last - 1)}")
    return any_of(ways)


def _mantissa(value: Decimal, *, upwards: bool) -> int:
    """Returns the first digit and those of the fraction as an integer of MOST_DIGITS + 1 digits."""
    scaled = Fraction(value) * Fraction(10) ** (MOST_DIGITS - value.adjusted())
    return math.ceil(scaled) if upwards else math.floor(scaled)


def _mantissas(least: int, most: int) -> str:
    low, high = str(least), str(most)
    return _between(int(low[0]), int(high[0]), (low[1:], high[1:]), needs_point=False)


def _exponents(first: int, last: int) -> str:
    ways = []
    if last >= 0:
        ways.append(rf"\+?0?{integers(max(0, first), last)}")
    if first < 0:
        ways.append(f"-0?{integers(max(1, -last), -first)}")
    return any_of(ways)
