"""Split work: programs store their parts of a result and count themselves; the last one to arrive adds the parts up."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

# device -> zeros. Counters return to zero by the end of every launch, so one buffer serves all launches of a stream,
# and no launch needs to clear any. An outgrown buffer is kept: captured graphs have its address. Capture cannot grow
# it: the new buffer would be in the graphs' memory pool, which is reused.
_counters: dict[torch.device, list[Tensor]] = {}
# device -> the stream that its launches are on. On two streams, launches would count each other's programs.
_streams: dict[torch.device, int] = {}


def arrival_counters(device: torch.device, size: int) -> Tensor:
    """Returns counters, int32 zeros, at least `size` of them. Raises RuntimeError on a second stream of a device; what
    is captured may be on any, as its replays are on one."""
    buffers = _counters.setdefault(device, [])
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if device.type == "cuda" and not is_capturing:
        _check_stream(
            device, torch._C._cuda_getCurrentRawStream(device.index or 0)
        )  # without an object for each launch
    if not buffers or buffers[-1].numel() < size:
        if is_capturing:
            raise RuntimeError(
                "a split attention or product has more parts than any before: run this batch size once before "
                "capturing it in a CUDA graph"
            )
        buffers.append(torch.zeros(max(1 << 16, triton.next_power_of_2(size)), dtype=torch.int32, device=device))
    return buffers[-1]


def _check_stream(device: torch.device, stream: int) -> None:
    if _streams.setdefault(device, stream) != stream:
        raise RuntimeError(
            f"split kernels of {device} are launched on a second stream: their counters of finished programs serve one "
            "stream; launch all steps on the same stream"
        )


def num_left_counting() -> Tensor | None:
    """Returns how many counters are not 0, int64 on the device and behind all that was launched there; None: there are
    no counters. Any but 0 means that later results may be wrong. A process has one device."""
    buffers = [buffer for of_device in _counters.values() for buffer in of_device]
    return torch.stack([buffer.count_nonzero() for buffer in buffers]).sum() if buffers else None


@triton.jit
def arrives_last(arrived_ptr, num_splits):
    """Counts a program that has stored its part. Returns whether it is the last of num_splits; the counter is then 0
    again, for the next launch."""
    tl.debug_barrier()  # all threads have stored before one of them counts the program
    is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    tl.store(arrived_ptr, 0, mask=is_last)
    return is_last


@triton.jit
def sum_of_parts(parts, split_stride, num_splits, mask):
    """Returns the sum over all splits, in their order. parts: pointers to the part of the first; mask: of these, or
    None for all."""
    # The latency of a load is all that this loop costs, so it is pipelined; large tiles less deeply, for the sake of
    # shared memory.
    SIZE: tl.constexpr = parts.numel
    STAGES: tl.constexpr = 4 if SIZE <= 2048 else 2 if SIZE <= 16384 else 1
    total = tl.zeros(parts.shape, dtype=parts.dtype.element_ty)
    for split in tl.range(0, num_splits, num_stages=STAGES):
        # What other multiprocessors stored is seen because the counter's atomic acquires; ".cg" keeps the L1 cache out.
        if mask is None:
            total += tl.load(parts + split * split_stride, cache_modifier=".cg")
        else:
            total += tl.load(parts + split * split_stride, mask=mask, other=0, cache_modifier=".cg")
    return total
