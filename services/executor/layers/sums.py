"""The exchange between ranks for products with weights that are divided among them, and sums of several products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from torch import Tensor
from torch.nn import functional

from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.shares import even_share
from pagewire.services.executor.layers.weight_format import input_unit
from pagewire.services.executor.parallel.communicator import ALONE, Communicator


class Summed(Protocol):
    """A layer that may end with a sum over ranks."""

    @property
    def summing_ranks(self) -> Communicator | None:
        """Returns the ranks between which it sums the parts of its output; None: its output needs no sum."""

    def leave_sum(self) -> None:
        """Makes it return the rank's part of its output from now on."""


class JointSum:
    """The sum over ranks of several layers, of which the outputs are added first. If all of them sum over ranks, they
    leave this sum to this object, which is called with their added outputs. Otherwise the layers stay unchanged."""

    __slots__ = ("_ranks",)

    def __init__(self, *layers: Summed) -> None:
        found = [layer.summing_ranks for layer in layers]
        self._ranks = ALONE if found[0] is None or None in found else found[0]
        if self._ranks is not ALONE:
            for layer in layers:
                layer.leave_sum()

    def __call__(self, total: Tensor) -> Tensor:
        """total [num_tokens, hidden_size], same shape out; may be overwritten"""
        return self._ranks.all_reduce(total)


# Of inputs; adds the bias.
Product: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]


class Exchange:
    """The exchange between ranks for a product with a weight divided among them."""

    __slots__ = ("gathers_inputs", "leaves_sum", "num_outputs", "ranks", "share", "sums")

    def __init__(self, ranks: Communicator, *, gathers_inputs: bool = False, sums: bool = False) -> None:
        """sums: add the ranks' outputs; otherwise put `share` of each side by side, and cut them to `num_outputs`."""
        self.ranks = ranks
        self.gathers_inputs = gathers_inputs
        self.sums = sums
        self.leaves_sum = False  # whether the caller sums, after adding this to other outputs
        self.num_outputs = 0
        self.share = 0

    def __call__(self, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.sums:
            part = product(x, bias if self.ranks.rank == 0 else None)
            return part if self.leaves_sum else self.ranks.all_reduce(part)
        if self.gathers_inputs:
            x = self.ranks.all_gather(x)
        return self.gathered(product(x, bias))

    def gathered(self, outputs: Tensor) -> Tensor:
        """outputs [num_tokens, the rank's] -> [num_tokens, all]. The last rank may have fewer."""
        if outputs.shape[1] < self.share:
            outputs = functional.pad(outputs, (0, self.share - outputs.shape[1]))
        gathered = self.ranks.all_gather(outputs)
        return gathered if gathered.shape[1] == self.num_outputs else gathered[:, : self.num_outputs].contiguous()


def share_of_inputs(in_features: int, shards: Mapping[str, int], placement: Placement) -> range | None:
    """Returns None if the split would divide groups of inputs that share scales or are in another order."""
    share = even_share(f"the inputs of {placement.name(next(iter(shards)))}", in_features, placement.tensor)
    units = [input_unit(placement.format(name), size, in_features) for name, size in shards.items()]
    return share if all(len(share) % unit == 0 for unit in units) else None
