"""Merge lists for vocabularies that come without one."""

from collections.abc import Mapping
from typing import TypeVar

Piece = TypeVar("Piece", str, bytes)


def merges_by_rank(ranks: Mapping[Piece, float]) -> list[tuple[Piece, Piece]]:
    """Returns the merges: two neighbors may merge if the result is in the vocabulary, lowest rank first.

    SentencePiece (rank = minus the score) and tiktoken work this way. Among equal ranks, those with the longer left
    part come first, as in other conversions to merge lists.
    """
    found: list[tuple[float, int, int, int, Piece, Piece]] = []
    for index, (piece, rank) in enumerate(ranks.items()):
        for cut in range(len(piece) - 1, 0, -1):
            left: Piece = piece[:cut]
            if left in ranks and (right := piece[cut:]) in ranks:
                found.append((rank, -cut, cut - len(piece), index, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
