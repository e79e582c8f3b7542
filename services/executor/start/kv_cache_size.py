"""The size of a CUDA device's KV cache: its memory minus everything else that serving takes."""

from __future__ import annotations

from dataclasses import dataclass

from pagewire.services.executor.device.memory import DeviceMemory


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes that serving takes apart from the KV cache; measured once (`memory_profile`)."""

    peak_bytes: int  # torch's peak in the largest steps: weights, rows, activations
    library_bytes: int  # growth of memory outside torch in these steps: kernel code, handles, workspaces
    graph_bytes: int  # all CUDA graphs


def kv_cache_bytes(memory: DeviceMemory, utilization: float, profile: MemoryProfile) -> int:
    """Returns utilization * total - outside torch - libraries - peak - graphs; negative if that does not fit.

    memory: the state before the profile was measured, or would have been.
    """
    taken = memory.outside_torch + profile.library_bytes + profile.peak_bytes + profile.graph_bytes
    return int(memory.total * utilization) - taken


def graphs_bytes(largest: int, second: int, num_graphs: int) -> int:
    """Memory of all graphs, from that of the two largest: largest + (num_graphs - 1) * second.

    Graphs share one pool. The largest, captured first, allocates it; each further graph fits into it and adds little
    more than its kernel nodes. The second is larger than the rest, so this is an upper estimate.
    """
    return max(0, largest) + max(0, num_graphs - 1) * max(0, second) if num_graphs else 0
