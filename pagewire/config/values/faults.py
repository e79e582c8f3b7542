"""The value of --fault-injection: steps that fail on purpose."""

import enum
from dataclasses import dataclass

from pagewire.errors import StartupError


class Kind(enum.StrEnum):
    RAISE = "raise"  # an exception in the middle of a step
    NAN = "nan"  # in the hidden state that the next token is sampled from
    ILLEGAL = "illegal"  # the sampled id is outside the vocabulary
    DEVICE = "device"  # an exception, in this step and in all later ones
    HANG = "hang"  # the step does not end
    EXIT = "exit"  # the process ends without a report


@dataclass(frozen=True)
class Fault:
    kind: Kind
    num_output_tokens: int = 0  # output tokens of the request before the fault occurs


def parse_faults(text: str) -> dict[int, Fault]:
    """Returns the faults of "ID:KIND[@OUTPUT],..." by token id. Raises StartupError."""
    faults = {}
    for part in text.split(","):
        token_id, _, rest = part.strip().partition(":")
        kind, _, num_output_tokens = rest.partition("@")
        try:
            faults[int(token_id)] = Fault(Kind(kind), int(num_output_tokens or 0))
        except ValueError as error:
            raise StartupError(
                f"--fault-injection: {part!r} is not ID:KIND or ID:KIND@OUTPUT, where KIND is one of {', '.join(Kind)}"
            ) from error
    return faults
