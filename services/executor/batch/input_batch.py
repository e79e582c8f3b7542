"""The inputs of the model for one step: the host names the rows, the device gathers the rest from them.

`input_buffers` has the device's side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.step.step import InvalidStep, Step

# Attending to this many tokens costs at most as much as the rest of a token's forward pass.
_CONTEXT_OF_A_TOKEN = 1000
_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class BatchShape:
    """The sizes that a step is launched with, padding included."""

    num_reqs: int
    num_tokens: int
    num_sampled: int  # positions; a request with drafts has several
    max_query_len: int
    min_query_len: int = 1  # without padding
    has_adapters: bool = False

    @classmethod
    def uniform(cls, num_reqs: int, query_len: int = 1) -> BatchShape:
        num_tokens = num_reqs * query_len
        return cls(num_reqs, num_tokens, num_tokens, query_len, query_len)

    @property
    def is_uniform(self) -> bool:
        """Every request has max_query_len tokens and is sampled after each; with one token, it is a decode step."""
        return self.num_tokens == self.num_sampled == self.num_reqs * self.max_query_len

    @property
    def has_drafts_only(self) -> bool:
        """Sampled after each token, and some request has several: only last tokens and drafts are computed."""
        return self.num_tokens == self.num_sampled and self.max_query_len > 1


@dataclass(frozen=True)
class InputBatch:
    """One step as the host sees it.

    Example: row 4 decodes at position 9, row 0 prefills 3 of its 8 prompt tokens, from the start:

    rows = [4, 0]    query_lens = [1, 3]    sampled = [0]    sampled_rows = [4]
    On the device, `step_inputs` computes: input_ids = token_ids[[4, 0, 0, 0], [9, 0, 1, 2]], positions = [9, 0, 1, 2]

    With two drafts for row 4: query_lens = [3, 3]  num_samples = [3]  sample_rows = [4, 4, 4]  offsets = [0, 1, 2]
    """

    rows: np.ndarray  # int64 [num_reqs], idx_mapping: batch index -> row
    query_lens: np.ndarray  # int64 [num_reqs]
    num_tokens: int
    sampled: np.ndarray  # int64 [R], indices into rows: requests that reach their last known token
    sampled_rows: np.ndarray  # int64 [R]
    vectors: np.ndarray  # int64 [V], indices into rows: requests that reach it and yield a vector
    num_samples: np.ndarray | None  # int64 [R], positions that each is sampled at, its drafts + 1; None = one each
    sample_rows: np.ndarray  # int64 [S], sampled position -> row
    offsets: np.ndarray | None  # int64 [S], drafts before each position; None = none
    load: float  # cost of computing it, in tokens without context
    adapter_slots: np.ndarray | None = None  # int32 [num_reqs], 0 = none; None: no request has an adapter

    @property
    def shape(self) -> BatchShape:
        longest, shortest = int(self.query_lens.max()), int(self.query_lens.min())
        has_adapters = self.adapter_slots is not None
        return BatchShape(len(self.rows), self.num_tokens, len(self.sample_rows), longest, shortest, has_adapters)


NO_REQUESTS = InputBatch(_NONE, _NONE, 0, _NONE, _NONE, _NONE, None, _NONE, None, 0.0)


def make_batch(
    step: Step,
    rows: np.ndarray,
    state: RequestState,
    num_slots: np.ndarray,
    max_tokens: int,
    max_draft_tokens: int = 0,
) -> InputBatch:
    """Returns the batch of a step. Raises InvalidStep.

    num_slots [num_reqs]: capacity of each request's blocks, in tokens.

    The state's counts may be upper bounds. All counts of a request are then too high by the same number, so their
    differences are exact.
    """
    query_lens = step.num_scheduled_tokens
    if len(query_lens) != len(rows):
        raise InvalidStep(f"{len(rows)} requests, but {len(query_lens)} num_scheduled_tokens")
    seq_lens, known = state.num_computed_tokens[rows] + query_lens, state.num_tokens[rows]
    drafts = step.num_draft_tokens if step.num_draft_tokens is not None and step.num_draft_tokens.any() else None
    reached = seq_lens if drafts is None else seq_lens - drafts  # of the known tokens
    wrong = (query_lens < 1) | (reached > known) | (seq_lens > num_slots)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise InvalidStep(
            f"request {step.request_ids[index]}: {query_lens[index]} tokens up to {seq_lens[index]} are scheduled, "
            f"it has {known[index]} tokens and blocks for {num_slots[index]}"
        )
    num_tokens = int(query_lens.sum())
    load = float((query_lens * (1 + seq_lens / _CONTEXT_OF_A_TOKEN)).sum())
    if num_tokens > max_tokens:
        raise InvalidStep(f"step {step.step_id} has {num_tokens} tokens; max_num_batched_tokens is {max_tokens}")
    sampled, vectors = np.flatnonzero(reached == known), _NONE
    if state.num_vectors:
        is_vector = state.yields_vector[rows[sampled]]
        sampled, vectors = sampled[~is_vector], sampled[is_vector]
    if drafts is not None:
        _check_drafts(step, drafts, query_lens, sampled, max_draft_tokens)
    lens = known[sampled] if drafts is None else known[sampled] + drafts[sampled]
    if len(sampled) and lens.max() >= state.max_model_len:
        raise InvalidStep(f"a request grows beyond max_model_len {state.max_model_len}")
    sampled_rows, num_samples, sample_rows, offsets = rows[sampled], None, rows[sampled], None
    if drafts is not None:
        num_samples = drafts[sampled] + 1
        sample_rows = np.repeat(sampled_rows, num_samples)
        offsets = np.arange(len(sample_rows)) - np.repeat(num_samples.cumsum() - num_samples, num_samples)
    slots = state.adapter_slots[rows]
    return InputBatch(
        rows,
        query_lens,
        num_tokens,
        sampled,
        sampled_rows,
        vectors,
        num_samples,
        sample_rows,
        offsets,
        load,
        slots if slots.any() else None,
    )


def _check_drafts(
    step: Step, drafts: np.ndarray, query_lens: np.ndarray, sampled: np.ndarray, max_draft_tokens: int
) -> None:
    """Raises InvalidStep for drafts that do not follow a last known token of the same step."""
    is_sampled = np.zeros(len(drafts), dtype=bool)
    is_sampled[sampled] = True
    wrong = (drafts < 0) | (drafts > np.where(is_sampled, max_draft_tokens, 0)) | (drafts >= query_lens)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise InvalidStep(
            f"request {step.request_ids[index]}: {drafts[index]} of {query_lens[index]} tokens are drafts; there may "
            f"be {max_draft_tokens}, behind its last known token, of a request that is sampled"
        )
