"""Memory of each rank's GPU that all ranks of a group can read and write: what `peer_all_reduce` adds through.

A tensor is added in parts of PART_BYTES, each by a program of its own on every rank. A rank writes its part to its own
memory, tells all others by flags in theirs, waits for theirs, and reads all. The number of a part's sums, its epoch, is
what flags hold, and decides which half of the memory is used: when a rank writes to a half again, the others have read
what was there, since they have told of a later epoch.

    parts   [2, PARTS, PART_BYTES]
    flags   int32 [PARTS, MOST_RANKS], zeros at first: the last epoch that each rank has told of
"""

from __future__ import annotations

__all__ = ["FLAGS_START", "HALF_BYTES", "MOST_RANKS", "PARTS", "PART_BYTES", "PEER_BYTES", "most_summed"]

# Programs must run at once on every rank, as they wait for each other: less than a multiprocessor holds of them.
PARTS, PART_BYTES, MOST_RANKS = 128, 8192, 8
HALF_BYTES = PARTS * PART_BYTES
FLAGS_START = 2 * HALF_BYTES
PEER_BYTES = FLAGS_START + 4 * PARTS * MOST_RANKS
# Every rank reads what all have: of more than this, a ring is faster. By count of bytes, not measured.
_MOST_SUMMED = {2: 1 << 20, 4: 512 << 10, MOST_RANKS: 256 << 10}


def most_summed(size: int) -> int:
    """Returns the most bytes of a tensor that `size` ranks should add so; 0 for too many ranks."""
    return next((most for ranks, most in _MOST_SUMMED.items() if size <= ranks), 0)
