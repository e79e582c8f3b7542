"""Counters of programs that have finished their part of a result; the last one to arrive puts the parts together."""

from __future__ import annotations

import torch
from torch import Tensor

import triton

# device -> zeros. Counters return to zero by the end of every launch, so one buffer serves all launches of a stream,
# and no launch needs to clear any. All launches are on one stream. An outgrown buffer is kept: captured graphs have
# its address. Capture cannot grow it: the new buffer would be in the graphs' memory pool, which is reused.
_counters: dict[torch.device, list[Tensor]] = {}


def arrival_counters(device: torch.device, size: int) -> Tensor:
    """Returns counters, int32 zeros, at least `size` of them."""
    buffers = _counters.setdefault(device, [])
    if not buffers or buffers[-1].numel() < size:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a split attention or product has more parts than any before: run this batch size once before "
                "capturing it in a CUDA graph"
            )
        buffers.append(torch.zeros(max(1 << 16, triton.next_power_of_2(size)), dtype=torch.int32, device=device))
    return buffers[-1]
