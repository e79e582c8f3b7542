"""What the ranks of a group on one machine compute together, through memory that they share (`kernels.channel`).

An op returns without a result once the group has ended, as it has when ranks do not do the same: it may be one of
hundreds in a recorded step. Whoever uses what comes of a step asks `channel_ended` first.
"""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op


@op(mutates=("x", "channel"), cuda=False)
def all_reduce(x: Tensor, channel: Tensor, rank: int, size: int) -> None:
    """x: that of rank 0 + that of rank 1 + ..., in fp32 and rounded once, in this order: the same bits on every rank.

    x        fp32, bf16 or fp16, contiguous, of the same size on all ranks
    channel  uint8 [channel_bytes(size)]
    """


@op(mutates=("channel",), cuda=False)
def all_gather(x: Tensor, channel: Tensor, rank: int, size: int) -> Tensor:
    """[n, size * k]: the columns of x [n, k] of rank 0, then those of rank 1, ...

    x        [n, k] of any dtype, of the same shape on all ranks
    channel  uint8 [channel_bytes(size)]
    """
    return x.new_empty(x.shape[0], size * x.shape[1])


@op(mutates=("x", "channel"), cuda=False)
def all_to_all(x: Tensor, rows: Tensor, starts: Tensor, channel: Tensor, rank: int, size: int) -> None:
    """Row rows[i] of x goes from rank s to the same row of rank d, for i in [starts[d * size + s], the next start).

    No shape depends on how many rows go where, and only those that do are read and written.

    x        [n, k] of any dtype, contiguous, of the same shape on all ranks, a row of at most SLOT_BYTES
    rows     int32 [at least starts[-1]], the same on all ranks; who receives a row sends it to nobody
    starts   int32 [size * size + 1], rising, the same on all ranks; what a rank has for itself stays
    channel  uint8 [channel_bytes(size)]
    """


@op(mutates=("x", "channel"), cuda=False)
def broadcast(x: Tensor, root: int, channel: Tensor, rank: int, size: int) -> None:
    """x: that of rank `root`.

    x        of any dtype, contiguous, of the same size on all ranks
    channel  uint8 [channel_bytes(size)]
    """
