"""What a model runner does as one stage of a pipeline: receive, pass on, and know the tokens that the last one samples.

All stages execute the same steps in the same order, each as soon as the one before it is done with its part. The host's
counts of tokens need no token, so nothing but the stream goes forward, and nothing but sampled ids back to the first
stage. It takes them when a step has one of their requests, and not before: until then it computes other steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.clock import StageTimes
from pagewire.services.executor.input_batch import InputBatch
from pagewire.services.executor.limits import Limits
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.parallel.pipe import Pipe
from pagewire.services.executor.parallel.stage import WHOLE, Stage
from pagewire.services.executor.request_state import RequestState
from pagewire.services.executor.step_context import Stream
from pagewire.services.executor.upload import upload


def stream_of(model: Model, max_num_tokens: int, device: torch.device) -> Stream:
    """Memory for what goes between its stages, of so many tokens."""
    shape, dtype = (max_num_tokens, model.config.hidden_size), model.config.dtype
    stream_dtype = getattr(model, "stream_dtype", None) or dtype
    return Stream(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=stream_dtype, device=device))


class OneStage:
    """The whole model is here."""

    is_last = True

    def begin(self) -> None: ...

    def stream(self, num_tokens: int) -> Stream | None:
        """Where the model finds and leaves what goes from stage to stage; num_tokens: padding included."""
        return None

    def receive(self, batch: InputBatch, state: RequestState) -> None:
        """Waits for what the step needs of other stages."""

    def pass_on(self, batch: InputBatch, state: RequestState) -> None:
        """Sends the stream to the next stage; the state's counts are those before the step."""

    def tell(self, token_ids: Tensor | None) -> None:
        """The step is computed, and int64 [R] were sampled; None: nobody was."""

    @property
    def times(self) -> StageTimes | None:
        """Of the last step, to the last stage."""
        return None


ONE_STAGE = OneStage()


class PipelineStage(OneStage):
    """One of several, each with a rank of its own or several that split its layers."""

    def __init__(
        self,
        stage: Stage,
        stream: Stream,
        *,
        before: Pipe | None = None,
        behind: Pipe | None = None,
        tokens: Sequence[Pipe] = (),
    ) -> None:
        """stream: of as many tokens as a step may have. before, behind: to the neighbours. tokens: from the leader to
        each rank of the first stage; on other ranks there are none."""
        assert stage is not WHOLE
        self._stage = stage
        self.is_last = stage.is_last
        self._stream = stream
        self._before, self._behind, self._tokens = before, behind, tokens
        self._awaited: deque[_Sampled] = deque()  # by the first stage, in the order of steps
        self._times: StageTimes | None = None
        self._begun = self._ended = time.perf_counter_ns()
        self._waited = 0
        self._earlier: tuple[int, ...] = ()  # times of the stages before

    def begin(self) -> None:
        self._begun = time.perf_counter_ns()
        self._waited = 0

    def stream(self, num_tokens: int) -> Stream:
        return Stream(self._stream.hidden[:num_tokens], self._stream.residual[:num_tokens])

    def receive(self, batch: InputBatch, state: RequestState) -> None:
        started = time.perf_counter_ns()
        if self._before is not None:
            stream = self.stream(batch.num_tokens)
            self._earlier = self._before.receive((stream.hidden, stream.residual), 1 + 2 * self._stage.index)
        else:
            self._earlier = (max(0, self._begun - self._ended),)
            self._take_tokens(batch, state)
        self._waited = time.perf_counter_ns() - started

    def pass_on(self, batch: InputBatch, state: RequestState) -> None:
        assert self._behind is not None
        if self._stage.is_first and len(batch.sampled_rows):
            self._awaited.append(_Sampled.of(batch.sampled_rows, state))
        stream = self.stream(batch.num_tokens)
        self._behind.send((*self._earlier, *self._own_times()), (stream.hidden, stream.residual))
        self._ended = time.perf_counter_ns()

    def tell(self, token_ids: Tensor | None) -> None:
        if token_ids is not None:
            for pipe in self._tokens:
                pipe.send((), (token_ids,))
        times = (*self._earlier, *self._own_times())
        # What the host measures where the device works by itself says nothing.
        self._times = (
            None if self._stream.hidden.is_cuda else StageTimes(busy=times[1::2], waited=times[2::2], late=times[0])
        )
        self._ended = time.perf_counter_ns()

    def _own_times(self) -> tuple[int, int]:
        return time.perf_counter_ns() - self._begun - self._waited, self._waited

    @property
    def times(self) -> StageTimes | None:
        return self._times

    def _take_tokens(self, batch: InputBatch, state: RequestState) -> None:
        """Writes the last tokens of the batch's requests to their rows, and those that were sampled before them."""
        # Those of steps that were done before this one was decided do not let it wait: nothing piles up.
        most = self._stage.count + 1
        while len(self._awaited) > most or any(sampled.has(batch.rows, state) for sampled in self._awaited):
            sampled = self._awaited.popleft()
            token_ids = torch.empty(len(sampled.rows), dtype=torch.int64, device=state.token_ids.device)
            self._tokens[0].receive((token_ids,))
            sampled.write(token_ids, state)


def stage_in(group: Group, model: Model, limits: Limits, device: torch.device) -> OneStage:
    """What this rank does as a stage; model: its part."""
    if group.stage is WHOLE:
        return ONE_STAGE
    stream, pipes = stream_of(model, limits.max_num_batched_tokens, device), group.pipes
    stream_bytes, token_bytes = (stream.hidden.nbytes, stream.residual.nbytes), (8 * limits.max_num_seqs,)
    return PipelineStage(
        group.stage,
        stream,
        before=None if pipes.before is None else pipes.before(stream_bytes),
        behind=None if pipes.behind is None else pipes.behind(stream_bytes),
        tokens=[end(token_bytes) for end in pipes.tokens],
    )


class TrialStage(OneStage):
    """One of several that try weights which they have read, by a step of their own, while others go on: what one stage
    gives to the next is told to all ranks. No token is sampled for a second step."""

    def __init__(self, group: Group, stream: Stream) -> None:
        """stream: as of PipelineStage."""
        self._stage, self._ranks, self._ranks_of_stage = group.stage, group.loading, group.tensor.size
        self.is_last = group.stage.is_last
        self._stream = stream

    def stream(self, num_tokens: int) -> Stream:
        return Stream(self._stream.hidden[:num_tokens], self._stream.residual[:num_tokens])

    def receive(self, batch: InputBatch, state: RequestState) -> None:
        self._hear_of(range(self._stage.index), batch.num_tokens)

    def pass_on(self, batch: InputBatch, state: RequestState) -> None:
        self._hear_of(range(self._stage.index, self._stage.count - 1), batch.num_tokens)

    def _hear_of(self, stages: range, num_tokens: int) -> None:
        """Of each in turn, what its first rank has."""
        stream = self.stream(num_tokens)
        for stage in stages:
            root = (self._stage.count - 1 - stage) * self._ranks_of_stage
            for tensor in (stream.hidden, stream.residual):
                tensor.copy_(self._ranks.broadcast(tensor, root))


def trial_stage(group: Group, model: Model, limits: Limits, device: torch.device) -> OneStage:
    """As `stage_in`, for a single step with weights that are not in force."""
    return (
        ONE_STAGE
        if group.stage is WHOLE
        else TrialStage(group, stream_of(model, limits.max_num_batched_tokens, device))
    )


@dataclass(frozen=True)
class _Sampled:
    """Who was sampled in a step whose ids are still to come."""

    rows: np.ndarray  # int64 [R]
    admissions: np.ndarray  # int64 [R], requests that each row had had
    positions: np.ndarray  # int64 [R], where the tokens belong

    @classmethod
    def of(cls, rows: np.ndarray, state: RequestState) -> _Sampled:
        """Before the state advances."""
        return cls(rows, state.admissions(rows), state.num_tokens[rows])

    def has(self, rows: np.ndarray, state: RequestState) -> bool:
        return bool(np.isin(self.rows[self._are_here(state)], rows).any())

    def write(self, token_ids: Tensor, state: RequestState) -> None:
        """token_ids int64 [R]. Rows that have gone to other requests since are left alone."""
        here = np.flatnonzero(self._are_here(state))
        if len(here):
            device = token_ids.device
            index = upload(device, {"here": here, "rows": self.rows[here], "positions": self.positions[here]})
            # As sampling does, where it found no number (`ops.NOT_A_NUMBER`).
            values = token_ids.index_select(0, index["here"]).clamp(min=0).to(state.token_ids.dtype)
            state.token_ids[index["rows"], index["positions"]] = values

    def _are_here(self, state: RequestState) -> np.ndarray:
        return state.admissions(self.rows) == self.admissions
