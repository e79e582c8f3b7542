"""Steps of a drafting model, over the rows of its target, with separate counts of tokens.

A round is a plain step of one token per request. Tokens are drawn with the seeds of the rows, at the positions where
the target will draw its own, so with the same noise: if both models have the same distribution they draw the same
token, greedily or not. Each token is written behind the row's known ones, where it is the input of the next round, and
a draft in the next step. All rounds are staged together: between two rounds the device needs nothing from the host.
With several ranks the leader samples for all, as it does for the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.ops import MAX_DRAFTS
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import NO_REQUESTS, BatchShape, InputBatch
from pagewire.services.executor.batch.input_buffers import InputBuffers
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Record, Steps
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.sampling.tokens import OWN_TOKENS, Tokens
from pagewire.services.executor.step.dummy_step import NO_STEP
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step

_NONE = np.empty(0, dtype=np.int64)


class _Rows:
    """The rows of a state with other counts of tokens."""

    def __init__(self, state: RequestState, first: int) -> None:
        self.token_ids = state.token_ids[:, first:]
        self.columns = state.columns.with_own_counts()


@dataclass(frozen=True)
class Target:
    """The parts of the target's runner that drafting needs."""

    model: Model
    limits: Limits
    num_blocks: int
    device: torch.device
    split_size: int = 0  # ModelRunner's
    steps: Callable[[], Steps] = CudaGraphs  # how steps of a drafting model are launched
    tokens: Tokens = OWN_TOKENS  # how several ranks sample


class DraftSteps:
    """Steps of one drafting model. Nothing here waits for the device."""

    reads_ahead = 0  # the input of each position is the token this many positions after it

    def __init__(self, model: Model, target: Target, state: RequestState, block_tables: BlockTables) -> None:
        """state, block_tables: the target runner's."""
        limits, device = target.limits, target.device
        self._model = model
        self._block_size = limits.block_size
        self._state, self._block_tables = state, block_tables
        self._rows = _Rows(state, self.reads_ahead)
        self._split_size = target.split_size
        self._inputs = InputBuffers(
            limits.max_num_seqs, limits.max_num_batched_tokens, block_tables, device, max_rounds=MAX_DRAFTS
        )
        self._graphs = target.steps()
        self._tokens = target.tokens

    @torch.inference_mode()
    def capture(self, shapes: Sequence[BatchShape], progress: Progress, record: Record) -> None:
        """Captures CUDA graphs of steps of these shapes, by empty steps. The largest comes first."""
        self._graphs = graphs = CudaGraphs()

        def nobodys_step(shape: BatchShape) -> None:
            self._inputs.stage(NO_REQUESTS, NO_STEP, self._block_tables, shape)
            self._run(shape, samples=shape.num_sampled > 0)

        for index, shape in enumerate(shapes):
            progress(index / len(shapes), f"CUDA graph of {shape.num_tokens} tokens, drafting")
            graphs.capture(shape, record, partial(nobodys_step, shape))

    def start(self, num_missing: np.ndarray | None = None) -> None:
        """Takes over the rows' numbers of tokens. num_missing int64 [max_num_seqs]: the number of last tokens that are
        not computed; by default one."""
        mine, num_tokens = self._rows.columns, self._state.columns.num_tokens
        mine.num_tokens.copy_(num_tokens)
        if num_missing is None:
            torch.sub(num_tokens, 1, out=mine.num_computed_tokens)
        else:
            missing = upload(num_tokens.device, {"missing": num_missing})["missing"]
            torch.sub(num_tokens, missing, out=mine.num_computed_tokens)
            mine.num_computed_tokens.clamp_(min=0)  # if drafts were refused and the host does not know it yet

    def draft(self, step: Step, batch: InputBatch, counts: np.ndarray, *, is_begun: bool = False) -> None:
        """Runs rounds of one token each until the batch's requests have counts int64 [n] drafts.

        is_begun: each request has its first draft already.
        """
        sizes = [int((counts > drafted).sum()) for drafted in range(int(is_begun), int(counts.max(initial=0)))]
        if not sizes:
            return
        indices = np.argsort(-counts, kind="stable")[: sizes[0]]  # requests with enough drafts leave at the end
        num_groups = self._block_tables.num_groups
        blocks = without_blocks(len(indices), num_groups) if is_begun else with_blocks_of(step, indices)
        staged = _batch(batch.rows[indices], np.ones_like(indices), np.arange(len(indices)))
        shape = self._graphs.padded(staged.shape)
        self._inputs.stage_rounds(staged, sizes, blocks, self._block_tables, shape)
        for index, size in enumerate(sizes):
            shape = self._graphs.padded(BatchShape.uniform(size))
            self._inputs.begin_round(index, shape.num_reqs)
            self._run(shape)

    def run(self, step: Step, rows: np.ndarray, query_lens: np.ndarray, sampled: np.ndarray) -> None:
        """Runs a round. rows, query_lens int64 [n]; sampled int64 [m]: indices of the rows that get a token.

        step: has the new blocks of these rows, which are counted in the block tables already.
        """
        batch = _batch(rows, query_lens, sampled)
        shape = self._graphs.padded(batch.shape)
        self._inputs.stage(batch, step, self._block_tables, shape)
        self._run(shape, samples=len(sampled) > 0)

    def _run(self, shape: BatchShape, samples: bool = True) -> None:
        """Runs the staged step."""
        hidden = self._graphs.run("forward", shape, lambda: self._forward(shape))
        if samples:
            self._graphs.run("sample", shape, lambda: self._sample(hidden, shape))

    @torch.inference_mode()
    def record_missing(self) -> bool:
        """Records a missing step, as `ModelRunner.record_missing` does."""
        shape = self._graphs.missing()
        if shape is None:
            return False
        self._inputs.stage(NO_REQUESTS, NO_STEP, self._block_tables, shape)
        self._run(shape, samples=shape.is_uniform)
        return True

    def _forward(self, shape: BatchShape) -> Tensor:
        input_ids, context = self._inputs.gather(
            shape, self._rows, self._block_tables, self._block_size, self._split_size
        )
        return self._model.forward(input_ids, context)

    def _sample(self, hidden: Tensor, shape: BatchShape) -> Tensor:
        logits = self._model.compute_logits(self._inputs.select_sampled(shape, hidden))
        rows = self._inputs.sample_rows(shape.num_sampled)
        return self._tokens.sample(logits, rows, self._rows.columns, self._state.token_ids, None)


def _batch(rows: np.ndarray, query_lens: np.ndarray, sampled: np.ndarray) -> InputBatch:
    num_tokens, of_sampled = int(query_lens.sum()), rows[sampled]
    return InputBatch(
        rows, query_lens, num_tokens, sampled, of_sampled, _NONE, None, of_sampled, None, float(num_tokens)
    )


def with_blocks_of(step: Step, indices: np.ndarray) -> Step:
    """Returns the step that `DraftSteps.run` needs for the requests at these indices."""
    counts = step.num_new_blocks.sum(axis=1)
    if not len(step.new_block_ids):
        return replace(NO_STEP, num_new_blocks=step.num_new_blocks[indices])
    ends = counts.cumsum()
    ids = [step.new_block_ids[ends[i] - counts[i] : ends[i]] for i in indices.tolist()]
    return replace(NO_STEP, num_new_blocks=step.num_new_blocks[indices], new_block_ids=np.concatenate(ids))


def without_blocks(num_reqs: int, num_groups: int) -> Step:
    """Returns the step of a later round, without new blocks."""
    return replace(NO_STEP, num_new_blocks=np.zeros((num_reqs, num_groups), dtype=np.int64))
