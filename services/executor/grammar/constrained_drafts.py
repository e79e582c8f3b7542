"""Drafts for requests with a grammar or a thinking budget.

If the host can read drafts without waiting for the device, the drafts are the tokens that the grammar forces, such as
the keys of a JSON object, which cost nothing, and the permitted tokens of another proposer. Otherwise the other
proposer's drafts stay as they are, and wrong ones are refused. In both cases masks are filled for the positions behind
drafts while the device runs the forward pass (`constraints.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import BatchShape, InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.device.results import ResultCopies
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.grammar.constraints import GrammarConstraints
from pagewire.services.executor.graphs.cuda_graphs import Record
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.step.step import Step


class ConstrainedDrafts(Proposer):
    """A proposer that restricts the drafts of another one. Steps of a model that drafts are delegated to it."""

    def __init__(
        self, proposer: Proposer, constraints: GrammarConstraints, device: torch.device, *, is_alone: bool
    ) -> None:
        """constraints: the runner's. is_alone: no other rank has to draft the same tokens; only one rank has
        matchers."""
        self._proposer = proposer
        self._constraints = constraints
        self.max_draft_tokens = proposer.max_draft_tokens
        self.methods, self.kv_caches = proposer.methods, proposer.kv_caches
        self._chooses = is_alone and memory.is_shared(device)
        self._copies = ResultCopies(device)

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        num_drafted = self._proposer.propose(step, batch, state, block_tables)
        if batch.num_samples is not None and step.num_draft_tokens is not None:
            num_drafted = self._restrict(num_drafted, step.num_draft_tokens, batch, batch.num_samples, state)
        self._constraints.fill_masks()
        return num_drafted

    def _restrict(
        self,
        num_drafted: np.ndarray | None,
        num_asked: np.ndarray,
        batch: InputBatch,
        num_samples: np.ndarray,
        state: RequestState,
    ) -> np.ndarray | None:
        """Returns the number of drafts, int64 [num_reqs]. num_drafted: the number that is offered."""
        constraints = self._constraints
        # The same condition with which `SamplingState.prepare` asks for masks.
        num_tokens = state.num_tokens[batch.sampled_rows] + num_samples - 1 if state.is_exact else None
        restricted = constraints.are_restricted(batch.sampled_rows, num_tokens)
        asked = [index for index in restricted if num_samples[index] > 1]
        if not asked:
            return num_drafted
        counts = num_asked.copy() if num_drafted is None else num_drafted
        rows, places = batch.sampled_rows[asked], batch.sampled[asked]
        if self._chooses:
            counts[places] = self._choose(state, rows, counts[places], num_samples[asked] - 1)
        else:
            self._show(state, rows, counts[places])
        return counts

    def _choose(
        self,
        state: RequestState,
        rows: np.ndarray,
        counts: np.ndarray,
        most: np.ndarray,
    ) -> np.ndarray:
        """Replaces the drafts behind the known tokens of rows [n] with permitted ones and returns their new numbers,
        int64 [n]. counts [n]: numbers of drafts. most [n]: limits of the new numbers."""
        token_ids, starts = state.token_ids.numpy(), state.columns.num_tokens.numpy()[rows]
        bounds = list(zip(rows.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True))
        offered = [token_ids[row, start:end].tolist() for row, start, end in bounds]
        drafts = self._constraints.fitting(rows.tolist(), offered, most.tolist())
        for (row, start, _), chosen in zip(bounds, drafts, strict=True):
            token_ids[row, start : start + len(chosen)] = chosen
        num_kept = [num_equal(*pair) for pair in zip(offered, drafts, strict=True)]
        self.on_other_drafts(rows, starts + num_kept)
        self._constraints.look_ahead(rows.tolist(), lambda: drafts, max(map(len, drafts)))
        return np.array([len(chosen) for chosen in drafts], dtype=np.int64)

    def _show(self, state: RequestState, rows: np.ndarray, counts: np.ndarray) -> None:
        """Copies the drafts to the host during the forward pass."""
        most, token_ids = int(counts.max()), state.token_ids
        on_device = upload(token_ids.device, {"rows": rows})["rows"]
        behind = torch.arange(most, device=token_ids.device)
        # Columns behind the end of a row hold no draft.
        columns = (state.columns.num_tokens[on_device][:, None] + behind).clamp(max=token_ids.shape[1] - 1)
        pending = self._copies.fetch({"drafts": token_ids[on_device[:, None], columns]})

        def drafts() -> list[list[int]]:
            lines = pending.wait()["drafts"].tolist()
            return [line[:count] for line, count in zip(lines, counts.tolist(), strict=True)]

        self._constraints.look_ahead(rows.tolist(), drafts, most)

    def on_other_drafts(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        self._proposer.on_other_drafts(rows, num_tokens)

    def on_other_contents(self, group: int, blocks: np.ndarray) -> None:
        self._proposer.on_other_contents(group, blocks)

    def prefer(self, method: int) -> bool:
        return self._proposer.prefer(method)

    def reset(self) -> None:
        self._proposer.reset()

    def on_other_weights(self) -> None:
        self._proposer.on_other_weights()

    def prepare(self) -> bool:
        return self._proposer.prepare()

    def record_missing(self) -> bool:
        return self._proposer.record_missing()

    def graph_shapes(self, sizes: Sequence[int], prompts: Sequence[int] = ()) -> list[BatchShape]:
        return self._proposer.graph_shapes(sizes, prompts)

    def capture(self, shapes: Sequence[BatchShape], progress: Progress, record: Record) -> None:
        self._proposer.capture(shapes, progress, record)


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
