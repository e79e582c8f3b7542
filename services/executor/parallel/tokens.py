"""Who draws the next tokens: the leader does, and tells the other ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.config.sampling_params import with_defaults
from pagewire.kernels import ops
from pagewire.services.executor.parallel.communicator import Communicator
from pagewire.services.executor.parallel.group import LEADER, Group
from pagewire.services.executor.sampling.row_columns import RowColumns
from pagewire.services.executor.sampling.sampler import sample_tokens
from pagewire.v1.common_pb2 import SamplingParams


class Tokens(Protocol):
    """What a rank does for the next token of every sampled position."""

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        """As `sampler.sample_tokens`. May be recorded, or captured."""

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Of a request that the leader samples by these."""

    def tell(self, sampled: Tensor, num_sampled: int) -> None:
        """sampled int64 [at most num_sampled] was drawn in another way, in a step in which others call `sample` with
        num_sampled positions."""


class _OwnTokens:
    """There is no other rank."""

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        return sample_tokens(logits, rows, columns, token_ids, offsets)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        return params

    def tell(self, sampled: Tensor, num_sampled: int) -> None:
        pass


OWN_TOKENS: Tokens = _OwnTokens()


class LeadersTokens:
    """Drawn here; the other ranks are told."""

    def __init__(self, world: Communicator) -> None:
        self._world = world

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        sampled = sample_tokens(logits, rows, columns, token_ids, offsets)
        return self._world.broadcast(sampled, self._world.rank)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        return params

    def tell(self, sampled: Tensor, num_sampled: int) -> None:
        self._world.broadcast(F.pad(sampled, (0, num_sampled - len(sampled))), self._world.rank)


def followers_sampling(params: SamplingParams) -> SamplingParams:
    """What a rank that draws no token needs of a request's: log probabilities of prompts all compute together."""
    needed = SamplingParams(temperature=0)
    if params.HasField("prompt_logprobs"):
        needed.prompt_logprobs = params.prompt_logprobs
    return needed


def tokens_of(group: Group, max_samples: int, device: torch.device) -> Tokens:
    """max_samples: most positions that a step samples."""
    if group.tensor.size == 1 or not group.stage.is_last:
        return OWN_TOKENS
    if group.rank == LEADER:
        return LeadersTokens(group.tensor)
    return FollowersTokens(group.tensor, LEADER, max_samples, device)


class FollowersTokens:
    """The leader tells, and this rank appends to its rows what the leader appends to its own."""

    def __init__(self, world: Communicator, leader: int, max_samples: int, device: torch.device) -> None:
        """leader: its rank. max_samples: most positions of a step."""
        self._world, self._leader = world, leader
        self._starts = torch.arange(max_samples + 1, dtype=torch.int32, device=device)
        self._num_gained = torch.zeros(max_samples, dtype=torch.int64, device=device)

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        num_sampled = len(rows)
        sampled = self._world.broadcast(torch.empty(num_sampled, dtype=torch.int64, device=rows.device), self._leader)
        if offsets is None:  # else whoever has drafts appends (`accept_tokens`)
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

    def tell(self, sampled: Tensor, num_sampled: int) -> None:
        raise AssertionError("only the leader samples")
