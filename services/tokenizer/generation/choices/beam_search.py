"""Beam search: chooses the beginnings of an output to continue, and the best outputs, as transformers' generate() does.

It is pure: its input is the most probable next tokens of each beginning, however they are computed.

vLLM's search differs: it scores an output by all tokens, those of the prompt too, accepts improbable outputs
once they end, and never stops before max_tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Token ids with their log probabilities.
Continuations = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A beginning of an output, or all of it."""

    parent: "Hypothesis | None" = None  # all but the last token; None = no token yet
    token_id: int = -1  # the last token
    token_logprob: float = 0.0  # of the last token
    alternatives: Continuations = ()  # among which it was chosen
    logprob: float = 0.0  # of all tokens together
    length: int = 0  # in tokens

    def then(self, token_id: int, token_logprob: float, alternatives: Continuations) -> "Hypothesis":
        """Returns the hypothesis with one more token."""
        logprob = self.logprob + token_logprob
        return Hypothesis(self, token_id, token_logprob, alternatives, logprob, self.length + 1)

    @property
    def token_ids(self) -> list[int]:
        """All its tokens. Hypotheses share their beginnings, so memory grows with their number, not with number times
        length."""
        return [one.token_id for one in self.tokens()]

    def tokens(self) -> "list[Hypothesis]":
        """Returns the hypotheses that end with the first token, with the second, ..., and this one."""
        chain: list[Hypothesis] = []
        one: Hypothesis | None = self
        while one is not None and one.parent is not None:
            chain.append(one)
            one = one.parent
        return chain[::-1]


class BeamSearch:
    """Continues `width` beginnings at a time, and keeps the `width` best outputs."""

    def __init__(
        self,
        width: int,
        end_token_ids: Collection[int],
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        """max_tokens: limit of an output, end token included. For the others, see `BeamSearch` of inference.proto."""
        self._width = width
        self._end_token_ids = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._outputs: list[tuple[float, Hypothesis]] = []  # with their scores, the best first
        self.running = [Hypothesis()]  # the most probable first; empty: the search is over

    @property
    def num_continuations(self) -> int:
        """The number of next tokens that each beginning needs, so that at least `width` of them do not end it."""
        return self._width + len(self._end_token_ids)

    @property
    def outputs(self) -> list[Hypothesis]:
        """The outputs, the best first."""
        return [output for _, output in self._outputs]

    def advance(self, continuations: Sequence[Continuations]) -> None:
        """Takes one step. continuations: at least num_continuations for each running hypothesis, if the vocabulary has
        that many."""
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
        """Whether one of the running hypotheses, all of this length, can still become an output."""
        if not running or len(self._outputs) < self._width:
            return bool(running)
        return not self._early_stopping and running[0].logprob / length**self._length_penalty > self._outputs[-1][0]
