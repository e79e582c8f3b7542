"""What the ranks of a group on one machine compute together, through memory that they share (`kernels.channel`).

An op returns without a result once the group has ended, as it has when ranks do not do the same: it may be one of
hundreds in a recorded step. Whoever uses what comes of a step asks `channel_ended` first.
"""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op


@op(cuda=None, mutates=("x", "channel"))
def all_reduce(x: Tensor, channel: Tensor, rank: int, size: int) -> None:
    """x: that of rank 0 + that of rank 1 + ..., in fp32 and rounded once, in this order: the same bits on every rank.

    x        fp32, bf16 or fp16, contiguous, of the same size on all ranks
    channel  uint8 [channel_bytes(size)]
    """


@op(cuda=None, mutates=("channel",))
def all_gather(x: Tensor, channel: Tensor, rank: int, size: int) -> Tensor:
    """[n, size * k]: the columns of x [n, k] of rank 0, then those of rank 1, ...

    x        [n, k] of any dtype, of the same shape on all ranks
    channel  uint8 [channel_bytes(size)]
    """
    return x.new_empty(x.shape[0], size * x.shape[1])


@op(cuda=None, mutates=("x", "channel"))
def broadcast(x: Tensor, root: int, channel: Tensor, rank: int, size: int) -> None:
    """x: that of rank `root`.

    x        of any dtype, contiguous, of the same size on all ranks
    channel  uint8 [channel_bytes(size)]
    """
