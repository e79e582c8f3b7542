"""Shares of ranks in the outputs or the inputs of a layer: contiguous, in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable

from pagewire.config.parallel import ranks_refusal
from pagewire.services.executor.config.load_error import ModelLoadError
from pagewire.services.executor.parallel.communicator import Communicator


def even_share(what: str, total: int, ranks: Communicator, unit: int = 1) -> range:
    """Returns the rank's share, equal to every other rank's, in multiples of `unit`. what: a name for the error, e.g.
    "intermediate_size".

    Raises ModelLoadError naming the possible numbers of ranks.
    """

    def fits(size: int) -> bool:
        return total % (size * unit) == 0

    if not fits(ranks.size):
        of = f" in multiples of {unit}" if unit > 1 else ""
        raise refusal(ranks, f"{what} ({total}) cannot be split{of}", fits)
    count = total // ranks.size
    return range(ranks.rank * count, (ranks.rank + 1) * count)


def padded_share(what: str, total: int, ranks: Communicator, unit: int = 1) -> range:
    """Returns the rank's share, in multiples of `unit`; the last rank has what remains."""

    def fits(size: int) -> bool:
        return share_size(total, size, unit) * (size - 1) < total

    if not fits(ranks.size):
        raise refusal(ranks, f"{what} ({total}) cannot be split", fits)
    count = share_size(total, ranks.size, unit)
    return range(ranks.rank * count, min((ranks.rank + 1) * count, total))


def share_size(total: int, num_ranks: int, unit: int = 1) -> int:
    """Returns the size of a `padded_share`, except the last rank's."""
    return -(-total // (num_ranks * unit)) * unit


def refusal(ranks: Communicator, reason: str, fits: Callable[[int], bool]) -> ModelLoadError:
    """Returns the error for a number of ranks, which names the possible numbers. fits: whether a number is possible."""
    return ModelLoadError(ranks_refusal(ranks.size, reason, fits))
