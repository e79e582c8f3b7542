"""The parts of a configuration: `flag` makes a field, `Range` says which numbers it accepts."""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """The valid values of a number, or of each number of a list: minimum <= value <= maximum, and value > above."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    power_of_two: bool = False
    multiple_of: int = 1

    def __contains__(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (not self.power_of_two or int(value).bit_count() == 1)
            and (self.multiple_of == 1 or value % self.multiple_of == 0)
        )

    def __str__(self) -> str:
        bounds = [
            f"above {self.above}" if self.above is not None else "",
            f"at least {self.minimum}" if self.minimum is not None else "",
            f"at most {self.maximum}" if self.maximum is not None else "",
            "a power of two" if self.power_of_two else "",
            f"a multiple of {self.multiple_of}" if self.multiple_of != 1 else "",
        ]
        return ", ".join(filter(None, bounds))


POSITIVE = Range(minimum=1)
NOT_NEGATIVE = Range(minimum=0)
GIB = Range(minimum=0, maximum=1_048_576)
PORT = Range(minimum=0, maximum=65535)
PROCESSES = Range(minimum=1, maximum=1024)
SECONDS = Range(minimum=0, maximum=31_536_000)  # a year
POSITIVE_SECONDS = Range(above=0, maximum=31_536_000)


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    kind: str = "",
    valid: Range | None = None,
    secret: bool = False,
    short: str = "",
    takes: str = "value",
) -> Any:
    """Returns a dataclass field that is also a flag.

    kind: "size" accepts k/m/g (powers of 1000) and K/M/G, Ki/Mi/Gi, GiB... (powers of 1024) suffixes;
    "json" is the text of a JSON object, "texts" of a list of texts; "host" is a name or an address, perhaps in
    brackets (for other texts, see `values/texts.py`).
    A field of type `tuple[int, ...]` is a list: `1,2,4`, in YAML also `[1, 2, 4]`.
    secret: passed to child processes in the environment, never on their command line.
    short: short forms of the flag without their dash, separated by spaces.
    takes: "words" for a text that may be several words, which are joined by commas.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "kind": kind,
        "valid": valid,
        "secret": secret,
        "short": tuple(short.split()),
        "takes": takes,
    }
    return dataclasses.field(default=default, metadata=metadata)
