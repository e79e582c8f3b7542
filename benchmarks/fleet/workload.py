"""The simulated requests and their arrivals: conversations that begin with a shared system prompt, in bursts.

Requests arrive at a given rate, which goes up and down, with gaps of a gamma distribution (with a coefficient of
variation of 1 they come independently, above that in bursts). A request continues a conversation
`think_seconds` after its last answer, or begins a new one: every `turns`-th time, and when no conversation is ready.
So the rate is the given one from the first second on, however long conversations are.
"""

import random
from bisect import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.fleet.devices import BLOCK_SIZE

# Token ids that all lists share: a million requests are to fit into memory.
_IDS = list(range(1, 1 << 16))
_MAX_TOKENS = 4096  # of a conversation, after which it ends


@dataclass(frozen=True)
class Shape:
    """The shape of the requests; lengths are in tokens."""

    num_system_prompts: int = 500
    zipf: float = 1.0  # the n-th most popular system prompt has a share of n ** -zipf
    system_tokens: int = 400  # median
    user_tokens: int = 50  # median
    output_tokens: int = 80  # median
    turns: float = 4.0  # mean
    think_seconds: float = 5.0  # at least
    cv: float = 2.0  # coefficient of variation of gaps between requests
    peak: float = 1.5  # times the mean rate; the rest of the time the rate is lower by as much
    peak_seconds: float = 5.0  # that a peak lasts, and that are between two


@dataclass
class Conversation:
    """One user's. `token_ids` is all that was said, the system prompt first."""

    number: int
    system_prompt: int
    token_ids: list[int]
    num_known_tokens: int = 0  # of its next prompt, those that some replica has or had
    num_turns: int = 0


@dataclass(frozen=True)
class Turn:
    """A request to make."""

    conversation: Conversation
    max_tokens: int


@dataclass
class Workload:
    """A seed's requests. `ended` must be told of answers."""

    shape: Shape
    seed: int
    num_reusable_tokens: int = 0  # of all prompts, if one replica had served all requests and kept all blocks
    num_prompt_tokens: int = 0
    _ready: deque[tuple[float, Conversation]] = field(default_factory=deque)
    _num_conversations: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        count, shape = self.shape.num_system_prompts, self.shape
        self._popularity = list(accumulate((n + 1) ** -shape.zipf for n in range(count)))
        self._system_prompts = [
            self._tokens(n, self._length(shape.system_tokens, 0.7, _MAX_TOKENS // 2)) for n in range(count)
        ]
        self._is_known = [False] * count

    def arrivals(self, rate: float, num_requests: int) -> Iterator[float]:
        """Times, seconds. rate: requests per second, on average."""
        now, shape = 0.0, self.shape
        per_gap = 1 / shape.cv**2
        for _ in range(num_requests):
            is_peak = now // shape.peak_seconds % 2 == 1
            factor = shape.peak if is_peak else 2 - shape.peak
            now += self._draw.gammavariate(per_gap, 1 / (per_gap * rate * factor))
            yield now

    def next_turn(self, now: float) -> Turn:
        draw, shape = self._draw, self.shape
        goes_on = self._ready and self._ready[0][0] <= now and draw.random() >= 1 / shape.turns
        conversation = self._ready.popleft()[1] if goes_on else self._begin()
        conversation.token_ids += self._tokens(draw.randrange(1 << 31), self._length(shape.user_tokens, 0.8, 1024))
        conversation.num_turns += 1
        self.num_prompt_tokens += len(conversation.token_ids)
        self.num_reusable_tokens += conversation.num_known_tokens // BLOCK_SIZE * BLOCK_SIZE
        return Turn(conversation, self._length(shape.output_tokens, 0.8, 1024))

    def ended(self, turn: Turn, token_ids: list[int], now: float) -> None:
        """The answer is there. token_ids: prompt and answer."""
        conversation = turn.conversation
        if self._draw.random() >= 1 / self.shape.turns and len(token_ids) < _MAX_TOKENS:
            conversation.token_ids = token_ids
            conversation.num_known_tokens = len(token_ids) - 1  # the last one has not been computed
            self._ready.append((now + self.shape.think_seconds, conversation))

    def _begin(self) -> Conversation:
        self._num_conversations += 1
        which = bisect(self._popularity, self._draw.random() * self._popularity[-1])
        tokens = self._system_prompts[which]
        is_known, self._is_known[which] = self._is_known[which], True
        return Conversation(self._num_conversations, which, list(tokens), len(tokens) if is_known else 0)

    def _length(self, median: int, sigma: float, most: int) -> int:
        return max(1, min(most, int(median * self._draw.lognormvariate(0.0, sigma))))

    def _tokens(self, number: int, count: int) -> list[int]:
        """A text of its own for every number."""
        start = number % (len(_IDS) - count)
        return [_IDS[number // len(_IDS) % len(_IDS)], *_IDS[start : start + count - 1]]
