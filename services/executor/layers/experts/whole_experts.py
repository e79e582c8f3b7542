"""Experts that are divided among ranks as wholes (`--enable-expert-parallel`).

Attention leaves every token on every rank, so each rank routes all tokens and knows which ones its experts get.
The outputs of its experts reach the other ranks in one of two ways:

    sums       each rank sums up what its own experts make of every token, and the sums are added: `all_reduce`
    exchanges  ranks divide the tokens, too. What an expert makes of a token goes to the token's rank (`all_to_all`),
               which sums up as one would that has all experts; its sums go to all others (`all_gather`)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import ops
from pagewire.services.executor.layers.shares import refusal
from pagewire.services.executor.parallel.communicator import Communicator


def least_exchanged(top_k: int, num_ranks: int, device: torch.device) -> int | None:
    """Returns the least number of tokens for which ranks exchange; None: they always sum.

    A token has top_k rows to exchange, top_k / num_ranks of them per rank, and one row to sum. With few tokens the
    number of calls counts: one for sums, two for exchanges. Among four ranks, sums of 128 tokens took 0.8 to 1.05
    times as long, of 512 tokens 1.9 to 2.4 times. On CUDA the host would have to wait in every layer for the numbers
    of rows to exchange.
    """
    return 512 if top_k < num_ranks and device.type == "cpu" else None


class WholeExperts:
    """This rank's experts of a layer, and the combination of the outputs of all ranks."""

    __slots__ = ("_is_own", "_own", "_owners", "_ranks", "least_exchanged")

    def __init__(self, num_experts: int, top_k: int, ranks: Communicator, device: torch.device) -> None:
        self._ranks = ranks
        self._own = own_experts(num_experts, ranks)
        self.least_exchanged = least_exchanged(top_k, ranks.size, device)
        ends = torch.tensor([num_experts * rank // ranks.size for rank in range(1, ranks.size)], device="cpu")
        owners = torch.bucketize(torch.arange(num_experts, device="cpu"), ends, right=True)
        self._owners = owners.to(device, torch.int32)  # by expert
        self._is_own = (owners == ranks.rank).to(device, torch.float32)

    @property
    def first(self) -> int:
        """Returns the first of the rank's experts."""
        return self._own.start

    def own_starts(self, starts: Tensor) -> Tensor:
        """Returns the result of `ops.sort_by_expert` for products with the rank's experts: other pairs are neither read
        nor written."""
        return starts[self._own.start : self._own.stop + 1]

    def own_weights(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Returns the weights of `ops.route_experts`, with 0 for pairs with other experts."""
        return weights * self._is_own.index_select(0, ids.view(-1)).view_as(weights)

    def exchanges(self, num_tokens: int) -> bool:
        """Returns whether to exchange; otherwise the ranks' parts of each token are summed."""
        return self.least_exchanged is not None and num_tokens >= self.least_exchanged

    def exchanged(self, pairs: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """pairs [num_tokens * top_k, hidden_size]: those with the rank's experts, overwritten; ids, weights: results
        of `ops.route_experts` -> [num_tokens, hidden_size]"""
        (num_tokens, top_k), size = ids.shape, self._ranks.size
        share = -(-num_tokens // size)
        of_tokens = torch.arange(num_tokens, dtype=torch.int32, device=ids.device) // share
        # Pairs by the rank of their token, then by the rank of their expert.
        ways = of_tokens[:, None] * size + self._owners.index_select(0, ids.view(-1)).view_as(ids)
        self._ranks.all_to_all(pairs, *ops.sort_by_expert(ways, size * size))
        first, stop = (min(num_tokens, share * rank) for rank in (self._ranks.rank, self._ranks.rank + 1))
        summed = ops.combine_experts(pairs[first * top_k : stop * top_k], weights[first:stop])
        if stop - first < share:
            summed = F.pad(summed, (0, 0, 0, share - (stop - first)))
        return self._ranks.all_gather(summed.view(1, -1)).view(size * share, -1)[:num_tokens]


def own_experts(num_experts: int, ranks: Communicator) -> range:
    """Returns the rank's neighbouring experts; if they cannot be divided evenly, some ranks have one more than others.

    Raises ModelLoadError if there are more ranks than experts.
    """
    if ranks.size > num_experts:
        reason = f"--enable-expert-parallel gives each of them one of {num_experts} experts at least"
        raise refusal(ranks, reason, lambda size: size <= num_experts)
    return range(num_experts * ranks.rank // ranks.size, num_experts * (ranks.rank + 1) // ranks.size)
