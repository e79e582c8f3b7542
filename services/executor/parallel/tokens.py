"""Tokens of ranks that split layers: the leader samples and broadcasts, the others receive."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagewire.config.sampling_params import with_defaults
from pagewire.kernels import ops
from pagewire.services.executor.parallel.communicator import Communicator
from pagewire.services.executor.parallel.group import LEADER, Group
from pagewire.services.executor.sampling.row_columns import RowColumns
from pagewire.services.executor.sampling.sampler import SampledTokens, sample_tokens
from pagewire.services.executor.sampling.tokens import OWN_TOKENS, Tokens
from pagewire.v1.common_pb2 import SamplingParams


class LeadersTokens:
    """Samples, and broadcasts the tokens to the other ranks."""

    def __init__(self, world: Communicator, max_samples: int, device: torch.device) -> None:
        """max_samples: the largest number of positions that a step samples, with padding."""
        self._world = world
        self._drawn = torch.zeros(max_samples, dtype=torch.int64, device=device)  # where captured steps find them

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        sampled = sample_tokens(logits, rows, columns, token_ids, offsets)
        return self._world.broadcast(sampled, self._world.rank)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        return params

    def draw(self, sampled: Callable[[], SampledTokens]) -> SampledTokens:
        drawn = sampled()
        self._drawn[: len(drawn.token_ids)].copy_(drawn.token_ids)
        return drawn

    def share(self, rows: Tensor, columns: RowColumns, token_ids: Tensor, *, appends: bool) -> Tensor:
        return self._world.broadcast(self._drawn[: len(rows)], self._world.rank)


def followers_sampling(params: SamplingParams) -> SamplingParams:
    """Returns the parameters that a non-sampling rank needs: all ranks score prompts together."""
    needed = SamplingParams(temperature=0)
    if params.HasField("prompt_logprobs"):
        needed.prompt_logprobs = params.prompt_logprobs
    return needed


def tokens_of(group: Group, max_samples: int, device: torch.device) -> Tokens:
    """Returns this rank's part in sampling. max_samples: the largest number of positions that a step samples, with
    padding."""
    if group.tensor.size == 1 or not group.stage.is_last:
        return OWN_TOKENS
    if group.rank == LEADER:
        return LeadersTokens(group.tensor, max_samples, device)
    return FollowersTokens(group.tensor, LEADER, max_samples, device)


class FollowersTokens:
    """Receives the leader's tokens, and appends to the rows the same tokens as the leader."""

    def __init__(self, world: Communicator, leader: int, max_samples: int, device: torch.device) -> None:
        """leader: its rank. max_samples: the largest number of positions that a step samples."""
        self._world, self._leader = world, leader
        self._starts = torch.arange(max_samples + 1, dtype=torch.int32, device=device)
        self._num_gained = torch.zeros(max_samples, dtype=torch.int64, device=device)

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        return self.share(rows, columns, token_ids, appends=offsets is None)  # if not, `InputBuffers.accept` appends

    def draw(self, sampled: Callable[[], SampledTokens]) -> SampledTokens:
        return SampledTokens(self._num_gained[:0], None)

    def share(self, rows: Tensor, columns: RowColumns, token_ids: Tensor, *, appends: bool) -> Tensor:
        num_sampled = len(rows)
        sampled = self._world.broadcast(torch.empty(num_sampled, dtype=torch.int64, device=rows.device), self._leader)
        if appends:
            ops.accept_tokens(
                sampled,
                rows,
                self._starts[: num_sampled + 1],
                token_ids,
                columns.num_tokens,
                columns.num_computed_tokens,
                self._num_gained[:num_sampled],
            )
        return sampled

    def sampling(self, params: SamplingParams) -> SamplingParams:
        return with_defaults(followers_sampling(params))
