"""The exchange of one stage of a pipeline: it receives the stream, passes it on, and receives the sampled tokens.

All stages execute the same steps in the same order, each as soon as the previous stage has finished its part. The
host's counts need no token values, so only the stream goes forward, and only sampled ids go back to the first stage,
which receives them when a step has one of their requests, not earlier: until then it computes other steps.

If tokens are drafted, all stages receive the ids and keep the same rows, so each computes the same drafts
(`speculation/`). The size of a step is then known only when the last tokens of its requests are.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.input_buffers import PADDING_ROW
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.clock import StageTimes
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.parallel.pipe import Pipe
from pagewire.services.executor.parallel.stage import WHOLE, Stage
from pagewire.services.executor.runner.stage import NO_EXCHANGE, StageExchange
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import DraftedStep, Step
from pagewire.services.executor.step.step_context import Stream


def stream_of(model: Model, max_num_tokens: int, device: torch.device) -> Stream:
    """Allocates the memory of the stream between stages, for max_num_tokens tokens."""
    shape = (max_num_tokens, model.config.hidden_size)
    hidden_dtype = getattr(model, "hidden_dtype", None) or model.config.dtype
    stream_dtype = getattr(model, "stream_dtype", None) or model.config.dtype
    return Stream(
        torch.zeros(shape, dtype=hidden_dtype, device=device), torch.zeros(shape, dtype=stream_dtype, device=device)
    )


class PipelineStage(StageExchange):
    """One stage of several. Each has one rank, or several that split its layers."""

    def __init__(
        self,
        stage: Stage,
        stream: Stream,
        *,
        before: Pipe | None = None,
        behind: Pipe | None = None,
        tokens: Sequence[Pipe] = (),
        drafts: bool = False,
    ) -> None:
        """stream: for the largest step. before, behind: pipes to the neighbours. tokens: pipes from the leader to each
        rank of the first stage, or of all but the last; empty on other ranks. drafts: whether tokens are drafted."""
        assert stage is not WHOLE
        self._stage = stage
        self.is_last = stage.is_last
        self._stream = stream
        self._before, self._behind, self._tokens = before, behind, tokens
        self._drafts = drafts
        self._awaited: deque[_Sampled] = deque()  # of a stage that receives tokens, in the order of steps
        self._times: StageTimes | None = None
        self._begun = self._ended = time.perf_counter_ns()
        self._waited = 0
        self._earlier: tuple[int, ...] = ()  # times of the earlier stages

    def begin(self, step: Step, state: RequestState) -> None:
        self._begun = time.perf_counter_ns()
        if self._drafts and not self.is_last:
            self._take_tokens(state.known_rows(step.request_ids), state)
        self._waited = time.perf_counter_ns() - self._begun

    def stream(self, num_tokens: int) -> Stream:
        return Stream(self._stream.hidden[:num_tokens], self._stream.residual[:num_tokens])

    def receive(self, batch: InputBatch, state: RequestState) -> None:
        started = time.perf_counter_ns()
        if self._before is not None:
            stream = self.stream(batch.num_tokens)
            self._earlier = self._before.receive((stream.hidden, stream.residual), 1 + 2 * self._stage.index)
        else:
            self._earlier = (max(0, self._begun - self._ended),)
            self._take_tokens(batch.rows, state)
        self._waited += time.perf_counter_ns() - started

    def pass_on(self, batch: InputBatch, state: RequestState, drafted: DraftedStep | None) -> None:
        assert self._behind is not None
        if (self._stage.is_first or self._drafts) and len(batch.sampled_rows):
            self._awaited.append(_Sampled.of(batch, state, drafted))
        stream = self.stream(batch.num_tokens)
        self._behind.send((*self._earlier, *self._own_times()), (stream.hidden, stream.residual))
        self._ended = time.perf_counter_ns()

    def end(self, token_ids: Tensor | None) -> None:
        if token_ids is not None:
            for pipe in self._tokens:
                pipe.send((), (token_ids,))
        times = (*self._earlier, *self._own_times())
        # The host's times are meaningless on a device that works asynchronously.
        self._times = (
            None if self._stream.hidden.is_cuda else StageTimes(busy=times[1::2], waited=times[2::2], late=times[0])
        )
        self._ended = time.perf_counter_ns()

    def leave(self) -> None:
        while self._awaited:
            ids = torch.empty(self._awaited.popleft().num_ids, dtype=torch.int64, device=self._stream.hidden.device)
            self._tokens[0].receive((ids,))

    def _own_times(self) -> tuple[int, int]:
        return time.perf_counter_ns() - self._begun - self._waited, self._waited

    @property
    def times(self) -> StageTimes | None:
        return self._times

    def _take_tokens(self, rows: np.ndarray, state: RequestState) -> None:
        """Writes the last tokens of the requests in these rows, and those that were sampled before them."""
        # Tokens of steps that ended before this one was decided have arrived; receiving them keeps the queue short.
        most = self._stage.count + 1
        while len(self._awaited) > most or any(sampled.has(rows, state) for sampled in self._awaited):
            sampled = self._awaited.popleft()
            token_ids = torch.empty(sampled.num_ids, dtype=torch.int64, device=state.token_ids.device)
            self._tokens[0].receive((token_ids,))
            sampled.write(token_ids, state)


def stage_in(
    group: Group, model: Model, limits: Limits, device: torch.device, max_draft_tokens: int = 0
) -> StageExchange:
    """Returns the exchange of this rank. model: this rank's part of the model."""
    if group.stage is WHOLE:
        return NO_EXCHANGE
    stream, pipes = stream_of(model, limits.max_num_batched_tokens, device), group.pipes
    stream_bytes, token_bytes = (
        (stream.hidden.nbytes, stream.residual.nbytes),
        (8 * limits.max_num_seqs * (1 + max_draft_tokens),),
    )
    return PipelineStage(
        group.stage,
        stream,
        before=None if pipes.before is None else pipes.before(stream_bytes),
        behind=None if pipes.behind is None else pipes.behind(stream_bytes),
        tokens=[end(token_bytes) for end in pipes.tokens],
        drafts=max_draft_tokens > 0,
    )


@dataclass(frozen=True)
class _Sampled:
    """The sampled rows of a step before its token ids arrive."""

    rows: np.ndarray  # int64 [R]
    admissions: np.ndarray  # int64 [R], number of requests that each row had had
    starts: np.ndarray  # int32 [R + 1]: ids of request i are those in [starts[i], starts[i + 1])
    drafted: DraftedStep | None

    @classmethod
    def of(cls, batch: InputBatch, state: RequestState, drafted: DraftedStep | None) -> _Sampled:
        rows = batch.sampled_rows
        counts = np.ones_like(rows) if batch.num_samples is None else batch.num_samples
        starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
        return cls(rows, state.admissions(rows), starts, drafted)

    @property
    def num_ids(self) -> int:
        return int(self.starts[-1])

    def has(self, rows: np.ndarray, state: RequestState) -> bool:
        return bool(np.isin(self.rows[self._are_here(state)], rows).any())

    def write(self, token_ids: Tensor, state: RequestState) -> None:
        """Writes token_ids int64 [num_ids] behind the known tokens of each row, as many as sampling keeps. Skips rows
        that were given to other requests since."""
        rows = np.where(self._are_here(state), self.rows, PADDING_ROW).astype(np.int32)
        index = upload(token_ids.device, {"rows": rows, "starts": self.starts})
        num_gained = torch.zeros(len(rows), dtype=torch.int64, device=token_ids.device)
        columns = state.columns
        ops.accept_tokens(
            token_ids,
            index["rows"],
            index["starts"],
            state.token_ids,
            columns.num_tokens,
            columns.num_computed_tokens,
            num_gained,
        )
        if self.drafted is not None:
            self.drafted.num_gained = num_gained.numpy()

    def _are_here(self, state: RequestState) -> np.ndarray:
        return state.admissions(self.rows) == self.admissions
