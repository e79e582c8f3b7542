"""Rules that choose one of several schedulers for a request."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from benchmarks.fleet.workload import Conversation
from pagewire.wire.streams import Affinity, balancing

# A conversation, and the live requests of each scheduler -> the scheduler's number.
Front = Callable[[Conversation, Sequence[int]], int]


class _Tokenizer:
    """Chooses as tokenizer services do."""

    def __init__(self, num_schedulers: int, affinity_of: Callable[[Conversation], Affinity | None]) -> None:
        self._affinity_of = affinity_of
        self._peers = [SimpleNamespace(number=n, address=f"{n}:50052", last_choice=0) for n in range(num_schedulers)]
        self._popularity = balancing.Popularity()

    def __call__(self, conversation: Conversation, num_live: Sequence[int]) -> int:
        for peer, load in zip(self._peers, num_live, strict=True):
            peer.load = load
        affinity = self._affinity_of(conversation)
        share = self._popularity.seen(affinity.beginning) if affinity else 0.0
        number: int = balancing.choose(self._peers, affinity, share).number
        return number


def _both(conversation: Conversation) -> Affinity:
    return Affinity(b"prompt %d" % conversation.system_prompt, b"conversation %d" % conversation.number)


def _prompt(conversation: Conversation) -> Affinity:
    key = b"prompt %d" % conversation.system_prompt
    return Affinity(key, key)


def _conversation(conversation: Conversation) -> Affinity:
    key = b"conversation %d" % conversation.number
    return Affinity(key, key)


_FRONTS: dict[str, Callable[[Conversation], Affinity | None]] = {
    "both": _both,  # the system prompt, or what of its schedulers the conversation has: what is served
    "prompt": _prompt,
    "conversation": _conversation,
    "least": lambda conversation: None,
}
FRONTS = tuple(_FRONTS)


def front(name: str, num_schedulers: int) -> Front:
    return _Tokenizer(num_schedulers, _FRONTS[name])
