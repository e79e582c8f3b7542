"""Which of several schedulers a request goes to."""

import hashlib
from bisect import bisect
from collections.abc import Callable, Sequence

from benchmarks.fleet.workload import Conversation

_POINTS = 64  # of each scheduler on the ring
# Nobody has more than so many times the mean of live requests (Mirrokni et al., "Consistent Hashing with Bounded
# Loads").
_BOUND = 1.25

# A conversation, and the live requests of each scheduler -> the scheduler's number.
Front = Callable[[Conversation, Sequence[int]], int]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


class _Ring:
    """Consistent hashing bounded by load."""

    def __init__(self, num_schedulers: int, key: Callable[[Conversation], str]) -> None:
        self._key = key
        points = sorted((_hash(f"{n}/{i}"), n) for n in range(num_schedulers) for i in range(_POINTS))
        self._places = [place for place, _ in points]
        self._owners = [owner for _, owner in points]

    def __call__(self, conversation: Conversation, num_live: Sequence[int]) -> int:
        bound = _BOUND * (sum(num_live) + 1) / len(num_live)
        start = bisect(self._places, _hash(self._key(conversation)))
        for i in range(len(self._owners)):
            owner = self._owners[(start + i) % len(self._owners)]
            if num_live[owner] < bound:
                return owner
        raise AssertionError("somebody has less than the mean")


def _least_loaded(conversation: Conversation, num_live: Sequence[int]) -> int:
    return min(range(len(num_live)), key=num_live.__getitem__)


def front(name: str, num_schedulers: int) -> Front:
    if name == "least":
        return _least_loaded
    if name == "prompt":
        return _Ring(num_schedulers, lambda conversation: f"prompt {conversation.system_prompt}")
    return _Ring(num_schedulers, lambda conversation: f"conversation {conversation.number}")


FRONTS = ("conversation", "prompt", "least")
