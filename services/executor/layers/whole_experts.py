"""Experts that ranks divide among themselves, each with whole ones (`--enable-expert-parallel`).

Attention leaves every token on every rank, so each routes all of them and needs nobody to know which its experts get.
What its experts make of them has to reach the others, in one of two ways:

    sums       each rank sums up what its own experts make of every token, and the sums are added: `all_reduce`
    exchanges  the ranks divide the tokens, too. What an expert makes of a token goes to the token's rank (`all_to_all`),
               which sums up as one rank would that has all experts, and its tokens to all others (`all_gather`)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import ops
from pagewire.services.executor.layers.shares import refusal
from pagewire.services.executor.parallel.communicator import Communicator

# (hidden [num_tokens, hidden_size], order, starts) -> [pairs, hidden_size], as `ops.experts_linear`
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]

_LEAST_EXCHANGED = 64  # tokens


class WholeExperts:
    """Which experts of a layer this rank has, and how ranks add up what all of them make of the tokens."""

    __slots__ = ("_is_own", "_owners", "num_experts", "own", "ranks")

    def __init__(self, num_experts: int, ranks: Communicator, device: torch.device) -> None:
        self.own = own_experts(num_experts, ranks)
        self.num_experts = num_experts
        self.ranks = ranks
        first = torch.tensor([num_experts * rank // ranks.size for rank in range(1, ranks.size)], device="cpu")
        owners = torch.bucketize(torch.arange(num_experts, device="cpu"), first, right=True)
        self._owners = owners.to(device, torch.int32)
        self._is_own = (owners == ranks.rank).to(device, torch.float32)

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor, multiply: Multiply) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out; ids, weights: of `ops.route_experts`; multiply: by the
        rank's experts."""
        order, starts = ops.sort_by_expert(ids, self.num_experts)
        # Of pairs with experts of other ranks nothing is read, and nothing written.
        pairs = multiply(hidden, order, starts[self.own.start : self.own.stop + 1])
        if self._exchanges(ids):
            return self._exchanged(pairs, ids, weights)
        own_weights = weights * self._is_own.index_select(0, ids.view(-1)).view_as(weights)
        return self.ranks.all_reduce(ops.combine_experts(pairs, own_weights))

    def _exchanges(self, ids: Tensor) -> bool:
        """A token has top_k rows to exchange, a top_k/N of them from each rank, and one to sum."""
        num_tokens, top_k = ids.shape
        if num_tokens < _LEAST_EXCHANGED or top_k >= self.ranks.size:
            return False
        return not (ids.is_cuda and torch.cuda.is_current_stream_capturing())  # the host needs to know how many

    def _exchanged(self, pairs: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        (num_tokens, top_k), size = ids.shape, self.ranks.size
        share = -(-num_tokens // size)
        tokens_rank = torch.arange(num_tokens, dtype=torch.int32, device=ids.device) // share
        # Pairs by the rank of their token, then by that of their expert.
        ways = tokens_rank[:, None] * size + self._owners.index_select(0, ids.view(-1)).view_as(ids)
        self.ranks.all_to_all(pairs, *ops.sort_by_expert(ways, size * size))
        first, stop = (min(num_tokens, share * rank) for rank in (self.ranks.rank, self.ranks.rank + 1))
        summed = ops.combine_experts(pairs[first * top_k : stop * top_k], weights[first:stop])
        if stop - first < share:
            summed = F.pad(summed, (0, 0, 0, share - (stop - first)))
        return self.ranks.all_gather(summed.view(1, -1)).view(size * share, -1)[:num_tokens]


def own_experts(num_experts: int, ranks: Communicator) -> range:
    """The rank's, neighbours; where they cannot be divided evenly, some ranks have one more than others.

    Raises ModelLoadError if there are more ranks than experts.
    """
    if ranks.size > num_experts:
        reason = f"--enable-expert-parallel gives each at least one of {num_experts} experts"
        raise refusal(ranks, reason, lambda size: size <= num_experts)
    return range(num_experts * ranks.rank // ranks.size, num_experts * (ranks.rank + 1) // ranks.size)
