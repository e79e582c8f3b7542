"""Suffix decoding: what followed the last tokens most often, in the request's own text and in outputs of others.

As in https://arxiv.org/abs/2411.04975, where the texts are in suffix trees. Here they are rows and arrays that are
searched, which finds the same places: what is kept are the tokens and no more. The longer the match, the more is
drafted; where continuations differ, the most frequent one is, as long as its share is large enough.

Outputs are shared within a domain only (`NewRequest.draft_domain`: tenant and cache salt), since the time that a token
takes would tell others what was generated.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from pagewire.services.executor.block_table import BlockTables
from pagewire.services.executor.input_batch import InputBatch
from pagewire.services.executor.request_state import RequestState
from pagewire.services.executor.step import NewRequest, Step

_MOST_PLACES = 128  # that are compared in one text, the latest
_MOST_TOKENS = 1 << 16  # of outputs that a domain has
_MOST_DOMAINS = 64
_END = -1  # behind each output; no token
_NO_PLACES = np.empty(0, dtype=np.int64)
_NO_DRAFT = np.empty(0, dtype=np.int32)


class SuffixProposer:
    """A `Proposer` of rows in memory that the host reads."""

    def __init__(
        self, max_draft_tokens: int, *, max_depth: int, max_requests: int, factor: float, min_probability: float
    ) -> None:
        """max_depth: most tokens in common that count. max_requests: of which outputs are kept, in each domain.
        factor: drafts for each token in common. min_probability: of a draft, by how often it was so."""
        self.max_draft_tokens = max_draft_tokens
        self._max_depth, self._max_requests = max_depth, max_requests
        self._factor, self._min_probability = factor, min_probability
        self.reset()

    def on_other_drafts(self, rows: np.ndarray, num_tokens: np.ndarray) -> None: ...

    def reset(self) -> None:
        self._requests: dict[int, _Output] = {}  # by id
        self._recent: OrderedDict[int, RecentOutputs] = OrderedDict()  # by domain, the last one used last

    def on_other_weights(self) -> None: ...

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        if step.new_requests:  # for whom alone it matters what others have left
            self._keep_outputs(state)
        for request in step.new_requests:
            self._requests[request.request_id] = _Output.of(request)
        token_ids, num_tokens = state.token_ids.numpy(), state.columns.num_tokens.numpy()
        drafted = None if batch.num_samples is None else np.zeros(len(batch.rows), dtype=np.int64)
        wanted = np.zeros(len(batch.sampled), dtype=np.int64) if batch.num_samples is None else batch.num_samples - 1
        for index, row, count in zip(batch.sampled.tolist(), batch.sampled_rows.tolist(), wanted.tolist(), strict=True):
            output, num_known = self._requests[step.request_ids[index]], int(num_tokens[row])
            output.follow(token_ids[row, :num_known])
            if count and drafted is not None:
                drafts = self.draft(token_ids[row, :num_known], output.domain, count)
                token_ids[row, num_known : num_known + len(drafts)] = drafts
                drafted[index] = len(drafts)
        return drafted

    def draft(self, text: np.ndarray, domain: int, count: int) -> np.ndarray:
        """int32 [at most count]: what is likely to follow a text int32 [n]."""
        if len(text) < 2:
            return _NO_DRAFT
        starts, length = places(text, text, self._max_depth)
        of_text = text
        if (recent := self._recent.get(domain)) is not None:
            others, longest = places(recent.tokens, text, self._max_depth)
            if longest > length:
                of_text, starts, length = recent.tokens, others, longest
        if not len(starts):
            return _NO_DRAFT
        count = min(count, max(1, int(self._factor * length)))
        return vote(of_text, starts, count, self._min_probability)

    def _keep_outputs(self, state: RequestState) -> None:
        """Of requests that have left. Steps that only free rows ask nobody for drafts."""
        for request_id in [request_id for request_id in self._requests if request_id not in state]:
            self._keep(self._requests.pop(request_id))

    def _keep(self, output: _Output) -> None:
        if not output.tokens or not self._max_requests:
            return
        recent = self._recent.setdefault(output.domain, RecentOutputs(self._max_requests))
        self._recent.move_to_end(output.domain)
        recent.add(output.tokens)
        if len(self._recent) > _MOST_DOMAINS:
            self._recent.popitem(last=False)


@dataclass
class _Output:
    """What a request has generated."""

    domain: int
    first: int  # tokens of its row that are known here, or prompt
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: NewRequest) -> _Output:
        return cls(request.draft_domain, request.num_prompt_tokens)

    def follow(self, text: np.ndarray) -> None:
        """Its row has this text now."""
        self.tokens += text[self.first :].tolist()
        self.first = max(self.first, len(text))


class RecentOutputs:
    """The last outputs of a domain, one behind the other."""

    def __init__(self, max_requests: int, max_tokens: int = _MOST_TOKENS) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._memory = np.empty(1024, dtype=np.int32)
        self._lengths: deque[int] = deque()  # of the outputs, what ends them included
        self._start = self._end = 0

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n], with _END behind each output"""
        return self._memory[self._start : self._end]

    def add(self, tokens: list[int]) -> None:
        added = np.array([*tokens[-self._max_tokens + 1 :], _END], dtype=np.int32)
        self._lengths.append(len(added))
        while self._lengths and (
            len(self._lengths) > self._max_requests or self._end - self._start + len(added) > self._max_tokens
        ):
            if len(self._lengths) == 1:
                self._start = self._end
                break
            self._start += self._lengths.popleft()
        if self._end + len(added) > len(self._memory):
            kept = self.tokens
            memory = np.empty(2 * (len(kept) + len(added)), dtype=np.int32)
            memory[: len(kept)] = kept
            self._memory, self._start, self._end = memory, 0, len(kept)
        self._memory[self._end : self._end + len(added)] = added
        self._end += len(added)


def places(text: np.ndarray, ended: np.ndarray, max_depth: int) -> tuple[np.ndarray, int]:
    """Where text int32 [n] goes on behind the last tokens of another one [m], m >= 2, or the same: int64 [p], those
    with most tokens in common; and how many these are, 2 to max_depth. None: [0], 0."""
    if len(text) < 3:
        return _NO_PLACES, 0
    # What would follow must be there.
    starts = np.flatnonzero((text[1:-1] == ended[-1]) & (text[:-2] == ended[-2])) + 2
    if not len(starts):
        return _NO_PLACES, 0
    starts = starts[-_MOST_PLACES:]
    depth = min(max_depth, len(ended))
    back = np.arange(1, depth + 1)
    at = starts[:, None] - back
    is_same = (text[np.maximum(at, 0)] == ended[-back]) & (at >= 0)
    common = np.where(is_same.all(1), depth, is_same.argmin(1))
    longest = int(common.max())
    return starts[common == longest], longest


def vote(text: np.ndarray, starts: np.ndarray, count: int, min_probability: float) -> np.ndarray:
    """int32 [at most count]: the most frequent of what follows each start in a text, token by token, as long as so
    large a share of all goes on like this. Of equally frequent ones, the lowest id, so that all ranks agree."""
    at = starts[:, None] + np.arange(count)
    followers = np.where(at < len(text), text[np.minimum(at, len(text) - 1)], _END)
    draft: list[int] = []
    for index in range(count):
        tokens = followers[:, index]
        token = int(tokens[-1])
        if (tokens != token).any():
            values, counts = np.unique(tokens[tokens != _END], return_counts=True)
            if not len(values):
                break
            token = int(values[counts.argmax()])
            followers = followers[tokens == token]
        if token == _END or len(followers) < min_probability * len(starts):
            break
        draft.append(token)
    return np.array(draft, dtype=np.int32)
