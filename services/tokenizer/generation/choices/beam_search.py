"""Which beginnings of an output to go on with, and which outputs are the best: the search of transformers' generate().

Pure: it is told the most probable next tokens of each beginning, and knows nothing of how they are computed.

The difference to vLLM's: that one scores an output by all tokens, the prompt's too, takes in outputs that end however
improbable they are, and never stops before max_tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Token ids with their log probabilities.
Continuations = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A beginning of an output, or all of it."""

    parent: "Hypothesis | None" = None  # without the last token; None = there is no token yet
    token_id: int = -1  # the last one
    token_logprob: float = 0.0  # of it
    alternatives: Continuations = ()  # among which it was chosen
    logprob: float = 0.0  # of all tokens together
    length: int = 0  # in tokens

    def then(self, token_id: int, token_logprob: float, alternatives: Continuations) -> "Hypothesis":
        """It and a token more."""
        logprob = self.logprob + token_logprob
        return Hypothesis(self, token_id, token_logprob, alternatives, logprob, self.length + 1)

    @property
    def token_ids(self) -> list[int]:
        """Not kept, as beginnings share theirs: what is kept grows with their number, not with that times length."""
        return [one.token_id for one in self.tokens()]

    def tokens(self) -> "list[Hypothesis]":
        """That which ends with the first token, with the second, ..., itself."""
        chain: list[Hypothesis] = []
        one: Hypothesis | None = self
        while one is not None and one.parent is not None:
            chain.append(one)
            one = one.parent
        return chain[::-1]


class BeamSearch:
    """Goes on with `width` beginnings at a time, and keeps as many outputs."""

    def __init__(
        self,
        width: int,
        end_token_ids: Collection[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        """max_tokens: of an output, with the end token. See `BeamSearch` of inference.proto for the others."""
        self._width = width
        self._end_token_ids = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._outputs: list[tuple[float, Hypothesis]] = []  # with their scores, the best first
        self.running = [Hypothesis()]  # whose next tokens are wanted, the most probable first; none: it is over

    @property
    def num_continuations(self) -> int:
        """How many of the most probable next tokens of each beginning are needed: `width` that do not end it."""
        return self._width + len(self._end_token_ids)

    @property
    def outputs(self) -> list[Hypothesis]:
        """The best first."""
        return [output for _, output in self._outputs]

    def advance(self, continuations: Sequence[Continuations]) -> None:
        """continuations: of each that is running, at least num_continuations unless the vocabulary is smaller."""
        candidates = [
            hypothesis.then(token_id, logprob, following)
            for hypothesis, following in zip(self.running, continuations, strict=True)
            for token_id, logprob in following
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)
        length = self.running[0].length + 1
        running: list[Hypothesis] = []
        for rank, candidate in enumerate(candidates):
            ends = length == self._max_tokens or candidate.token_id in self._end_token_ids
            if ends and rank < self._width:
                self._outputs.append((candidate.logprob / length**self._length_penalty, candidate))
            elif not ends and len(running) < self._width:
                running.append(candidate)
        self._outputs.sort(key=lambda output: -output[0])
        del self._outputs[self._width :]
        self.running = running if self._may_improve(running, length) else []

    def _may_improve(self, running: list[Hypothesis], length: int) -> bool:
        """Whether one of those that run, all of this length, is expected to become an output."""
        if not running or len(self._outputs) < self._width:
            return bool(running)
        return not self._early_stopping and running[0].logprob / length**self._length_penalty > self._outputs[-1][0]
