"""The op peer_all_reduce on CUDA: sums of small tensors in one launch, by reading all ranks' memories.

Parts are told of by a release, and waited for with an acquire, of the scope of the system. A wait ends when the last
rank has launched its own program of the part, so all programs of a launch have to run at once: `peer_memory.PARTS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.peer_memory import FLAGS_START, HALF_BYTES, MOST_RANKS, PART_BYTES, PARTS
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization
from triton.language import core

_FLAGS_START, _HALF_BYTES = tl.constexpr(FLAGS_START), tl.constexpr(HALF_BYTES)
_MOST_RANKS, _PART_BYTES = tl.constexpr(MOST_RANKS), tl.constexpr(PART_BYTES)
_NUM_WARPS = 8


def fence_of_system(_semantic: Any = None) -> None:
    """Orders, in a kernel, what a thread has seen before with what it reads behind, of all GPUs' memory."""
    if _semantic is not None:
        core.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
        )


# What marks a function that the compiler calls, as those of triton.language are.
fence_of_system.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit(do_not_specialize=["rank"])
def peer_all_reduce_kernel(
    x_ptr,  # [x_stride]
    peers_ptr,  # int64 [SIZE]
    epochs_ptr,  # int32 [PARTS]
    x_stride,
    rank,
    SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,  # of a part
):
    """One program for each part."""
    wait_for_inputs()
    launch_dependents()
    part = tl.program_id(0)
    epoch = tl.load(epochs_ptr + part) + 1
    start = (epoch & 1) * _HALF_BYTES + part * _PART_BYTES
    offsets = tl.arange(0, ELEMENTS)
    mask = part * ELEMENTS + offsets < x_stride
    x_ptrs = x_ptr + part * ELEMENTS + offsets
    own = tl.load(peers_ptr + rank)
    tl.store(_pointer(own + start, x_ptr.dtype) + offsets, tl.load(x_ptrs, mask=mask), mask=mask)

    tl.debug_barrier()  # all threads have stored before one of them tells of it
    ranks = tl.arange(0, _MOST_RANKS)
    there = ranks < SIZE
    peers = tl.load(peers_ptr + ranks, mask=there, other=0)
    flag = _FLAGS_START + part * (_MOST_RANKS * 4)
    told = (peers + flag + rank * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(told, tl.zeros([_MOST_RANKS], tl.int32) + epoch, mask=there, sem="release", scope="sys")
    flags = (own + flag + ranks * 4).to(tl.pointer_type(tl.int32))
    missing = SIZE
    while missing > 0:
        seen = tl.load(flags, mask=there, other=epoch, volatile=True)
        missing = tl.sum((seen - epoch < 0).to(tl.int32))
    fence_of_system()
    tl.debug_barrier()

    total = tl.zeros([ELEMENTS], dtype=tl.float32)
    for peer in tl.static_range(SIZE):
        theirs = _pointer(tl.load(peers_ptr + peer) + start, x_ptr.dtype)
        total += tl.load(theirs + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(x_ptrs, total.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(epochs_ptr + part, epoch)


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    """Returns a pointer to a part, which begins at a multiple of 16 bytes."""
    return tl.multiple_of(address.to(dtype), 16)


def peer_all_reduce(x: Tensor, peers: Tensor, epochs: Tensor, rank: int) -> None:
    """Computes `ops.peer_all_reduce`."""
    assert x.is_contiguous(), "x must be contiguous"
    assert peers.dtype is torch.int64 and epochs.dtype is torch.int32 and epochs.shape == (PARTS,)
    assert len(peers) <= MOST_RANKS and x.nbytes <= HALF_BYTES, f"up to {MOST_RANKS} ranks add {HALF_BYTES} bytes"
    if x.numel() == 0:
        return
    elements = PART_BYTES // x.element_size()
    peer_all_reduce_kernel[(triton.cdiv(x.numel(), elements),)](
        x, peers, epochs, x.numel(), rank,
        SIZE=len(peers), ELEMENTS=elements, num_warps=_NUM_WARPS, **dependent_launch(x.device),
    )  # fmt: skip


def specialization(dtype: str, size: int) -> Specialization:
    """Returns what `peer_all_reduce` launches with so many ranks. dtype: as Triton names it."""
    types = {"x_ptr": f"*{dtype}", "peers_ptr": "*i64", "epochs_ptr": "*i32", "x_stride": "i32", "rank": "i32"}
    constants = {"SIZE": size, "ELEMENTS": PART_BYTES // (4 if dtype == "fp32" else 2)}
    return Specialization(peer_all_reduce_kernel, types, constants, _NUM_WARPS, 2)
