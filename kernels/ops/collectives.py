"""Collectives of the ranks of a group on one machine, through memory that they share (`kernels.channel`, or
`kernels.peer_memory` of GPUs).

An op returns without a result once the group has ended, which also happens if ranks call different ops: it may be one
of hundreds in a recorded step. Call `channel_ended` before using the results of a step.
"""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op


@op(mutates=("x", "channel"), cuda=False)
def all_reduce(x: Tensor, channel: Tensor, rank: int, size: int) -> None:
    """Sums x over the ranks, in place: in fp32, in the order of the ranks and rounded once, so all ranks get the
    same bits.

    x        fp32, bf16 or fp16, contiguous, of the same size on all ranks
    channel  uint8 [channel_bytes(size)]
    """


@op(mutates=("channel",), cuda=False)
def all_gather(x: Tensor, channel: Tensor, rank: int, size: int) -> Tensor:
    """Returns [n, size * k]: the columns of x [n, k] of rank 0, then those of rank 1, ...

    x        [n, k] of any dtype, of the same shape on all ranks
    channel  uint8 [channel_bytes(size)]
    """
    return x.new_empty(x.shape[0], size * x.shape[1])


@op(mutates=("x", "channel"), cuda=False)
def all_to_all(x: Tensor, rows: Tensor, starts: Tensor, channel: Tensor, rank: int, size: int) -> None:
    """Row rows[i] of x goes from rank s to the same row of rank d, for i in [starts[d * size + s], the next start).

    No shape depends on how many rows go where, and only those that do are read and written.

    x        [n, k] of any dtype, contiguous, of the same shape on all ranks, a row of at most SLOT_BYTES
    rows     int32 [at least starts[-1]], the same on all ranks; a rank sends no row that it receives
    starts   int32 [size * size + 1], rising, the same on all ranks; what a rank has for itself stays
    channel  uint8 [channel_bytes(size)]
    """


@op(mutates=("x", "channel"), cuda=False)
def broadcast(x: Tensor, root: int, channel: Tensor, rank: int, size: int) -> None:
    """Copies x of rank `root` to x of all ranks.

    x        of any dtype, contiguous, of the same size on all ranks
    channel  uint8 [channel_bytes(size)]
    """


@op(mutates=("x", "epochs"))
def peer_all_reduce(x: Tensor, peers: Tensor, epochs: Tensor, rank: int) -> None:
    """Sums x over the ranks, in place: in fp32, in the order of the ranks and rounded once, so all ranks get the
    same bits. Waits for as long as a rank is missing.

    x       fp32, bf16 or fp16, contiguous, of at most HALF_BYTES, of the same size on all ranks
    peers   int64 [ranks]: addresses of their memories of PEER_BYTES (`pagewire.kernels.peer_memory`)
    epochs  int32 [PARTS], zeros at first: this rank's
    """
