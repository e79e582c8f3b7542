"""The drafts of a server by its metrics, which have vLLM's names in Pagewire, too."""

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pagewire.tools.bench.http import Connection, HttpError

_SAMPLE = re.compile(r"^\w+:spec_decode_(num_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Drafts:
    """Counts since the server's start, or since an earlier moment.

    num_drafts: requests with checked drafts, counted for each step. num_tokens: drafted tokens. num_accepted: accepted
    ones. by_position: accepted first drafts, second drafts, ...
    """

    num_drafts: float = 0.0
    num_tokens: float = 0.0
    num_accepted: float = 0.0
    by_position: tuple[float, ...] = ()

    def since(self, before: "Drafts") -> "Drafts":
        return self._plus(before, -1)

    def __add__(self, other: "Drafts") -> "Drafts":
        return self._plus(other, 1)

    def _plus(self, other: "Drafts", sign: int) -> "Drafts":
        return Drafts(
            self.num_drafts + sign * other.num_drafts,
            self.num_tokens + sign * other.num_tokens,
            self.num_accepted + sign * other.num_accepted,
            tuple(a + sign * b for a, b in zip_longest(self.by_position, other.by_position, fillvalue=0.0)),
        )

    @property
    def acceptance(self) -> float:
        """Returns the share of drafted tokens that were accepted, 0 to 1."""
        return self.num_accepted / self.num_tokens if self.num_tokens else 0.0

    def figures(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        shares = [round(count / self.num_drafts, 4) if self.num_drafts else 0.0 for count in self.by_position]
        return {
            "drafts": round(self.num_drafts),
            "drafted_tokens": round(self.num_tokens),
            "accepted_tokens": round(self.num_accepted),
            "acceptance": round(self.acceptance, 4),
            "accepted_by_position": shares,
        }

    def line(self) -> str:
        if not self.num_drafts:
            return "drafted nothing"
        by_position = " ".join(f"{100 * count / self.num_drafts:.0f}" for count in self.by_position)
        return (
            f"drafted {self.num_tokens:.0f} tokens, {self.num_tokens / self.num_drafts:.1f} at once; accepted"
            f" {self.num_accepted:.0f}, {100 * self.acceptance:.0f} % ({by_position} % by position)"
        )


def parsed(text: str) -> Drafts:
    """Parses a page of metrics, summed over executors; zeros if it has no metrics of drafts."""
    counts = {"num_drafts": 0.0, "num_draft_tokens": 0.0, "num_accepted_tokens": 0.0}
    by_position: dict[int, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name in counts:
            counts[name] += float(value)
        elif name == "num_accepted_tokens_per_pos" and (position := _POSITION.search(labels)):
            by_position[int(position[1])] = by_position.get(int(position[1]), 0.0) + float(value)
    positions = tuple(by_position.get(i, 0.0) for i in range(max(by_position, default=-1) + 1))
    return Drafts(counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"], positions)


async def read(connection: Connection) -> Drafts:
    """Reads the counts from a server; zeros if it does not have them."""
    try:
        status, _, body = await connection.exchange("GET", "/metrics", None)
    except (OSError, EOFError, HttpError, ValueError):
        connection.close()
        return Drafts()
    return parsed(body.decode("utf-8", "replace")) if status == 200 else Drafts()
