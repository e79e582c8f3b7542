"""Suffix decoding: drafts the most frequent continuation of the last tokens, in the request's text and other outputs.

As in https://arxiv.org/abs/2411.04975, where the texts are in suffix trees. Here rows and arrays are searched
(`ops.draft_by_suffix`), which finds the same places: only the tokens are kept. The longer the match, the more is
drafted; if continuations differ, the most frequent one is drafted while its share is large enough.

Outputs are shared within a domain only (`NewRequest.draft_domain`: tenant and cache salt), since the timing of tokens
would reveal to others what was generated.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
import torch

from pagewire.kernels import ops
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.step.step import NewRequest, Step

_MOST_TOKENS = 1 << 16  # of a domain's kept outputs
_MOST_DOMAINS = 64
_END = -1  # behind each output; no token
_NO_TOKENS = torch.empty(0, dtype=torch.int32)


class SuffixProposer(Proposer):
    """A proposer for rows in memory that the host reads."""

    methods = ("suffix",)

    def __init__(
        self, max_draft_tokens: int, *, max_depth: int, max_requests: int, factor: float, min_probability: float
    ) -> None:
        """max_depth: longest match that counts, in tokens. max_requests: number of outputs that each domain keeps.
        factor: drafts per matching token. min_probability: least share of a draft among the continuations."""
        self.max_draft_tokens = max_draft_tokens
        self._max_depth, self._max_requests = max_depth, max_requests
        self._factor, self._min_probability = factor, min_probability
        self.reset()

    def reset(self) -> None:
        self._requests: dict[int, _Output] = {}  # by id
        self._recent: OrderedDict[int, RecentOutputs] = OrderedDict()  # by domain, the latest used last

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        if step.new_requests:  # only they can use finished outputs
            self._keep_outputs(state)
        for request in step.new_requests:
            self._requests[request.request_id] = _Output.of(request)
        token_ids, num_tokens = state.token_ids.numpy(), state.columns.num_tokens.tolist()
        asking: dict[int, list[int]] = {}  # by domain, indices of samples
        for sample, (index, row) in enumerate(zip(batch.sampled.tolist(), batch.sampled_rows.tolist(), strict=True)):
            output = self._requests[step.request_ids[index]]
            output.follow(token_ids[row], num_tokens[row])
            if batch.num_samples is not None and batch.num_samples[sample] > 1:
                asking.setdefault(output.domain, []).append(sample)
        if batch.num_samples is None:
            return None
        drafted = np.zeros(len(batch.rows), dtype=np.int64)
        for domain, samples in asking.items():
            wanted = batch.num_samples[samples] - 1
            drafted[batch.sampled[samples]] = self._draft(batch.sampled_rows[samples], wanted, domain, state)
        return drafted

    def _draft(self, rows: np.ndarray, num_wanted: np.ndarray, domain: int, state: RequestState) -> np.ndarray:
        """Drafts for the rows of a domain; returns the numbers of drafted tokens, int64 [r]."""
        recent = self._recent.get(domain)
        num_found = torch.empty(len(rows), dtype=torch.int64)
        ops.draft_by_suffix(
            torch.from_numpy(rows.astype(np.int32)),
            torch.from_numpy(num_wanted.astype(np.int32)),
            state.token_ids,
            state.columns.num_tokens,
            _NO_TOKENS if recent is None else torch.from_numpy(recent.tokens),
            num_found,
            self._max_depth,
            self._factor,
            self._min_probability,
        )
        return num_found.numpy()

    def _keep_outputs(self, state: RequestState) -> None:
        """Keeps the outputs of finished requests. Steps that only free rows do not call `propose`."""
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
    """The output of a request."""

    domain: int
    first: int  # number of its row's tokens that are known here or belong to the prompt
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: NewRequest) -> _Output:
        return cls(request.draft_domain, request.num_prompt_tokens)

    def follow(self, row: np.ndarray, num_tokens: int) -> None:
        """Adds the tokens of its row up to num_tokens."""
        self.tokens += row[self.first : num_tokens].tolist()
        self.first = max(self.first, num_tokens)


class RecentOutputs:
    """The latest outputs of a domain, one behind the other."""

    def __init__(self, max_requests: int, max_tokens: int = _MOST_TOKENS) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._memory = np.empty(1024, dtype=np.int32)
        self._lengths: deque[int] = deque()  # of the outputs, including _END
        self._start = self._end = 0

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of all outputs, int32 [n], with _END behind each output."""
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
