"""Dense tensors from a checkpoint into a model's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from pagewire.services.executor.layers.parts import StoredPart
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.jobs import Job
from pagewire.services.executor.loading.weights.staging import Staging, cuda_staging

_STAGING_BYTES = 8 << 20  # of one buffer: long enough a copy to use the whole bus


def staging_for(device: torch.device, num_threads: int, targets: Mapping[str, Tensor]) -> Staging | None:
    """Buffers on the way to `device`, each for one row of any target at least; None for host memory."""
    if device.type == "cpu":
        return None
    longest_row = max((target[0].nbytes for target in targets.values()), default=0)
    return cuda_staging(device, 2 * num_threads, max(_STAGING_BYTES, longest_row))


def read_jobs(
    weights: WeightSource,
    targets: Mapping[str, Tensor],
    staging: Staging | None = None,
    parts: Mapping[str, StoredPart] | None = None,
) -> list[Job]:
    """Fill all targets.

    parts: what of stored tensors some of the targets are, see `WeightSource.read_into`.

    staging: for targets that are not in host memory. Each tensor then travels in pieces, in the order of the file, in
    the narrower of its stored dtype and its target's; everything has arrived after `staging.finish()`.
    """
    parts = parts or {}
    if staging is not None:
        return list(_pieces(weights, targets, staging, parts))
    largest_first = sorted(targets, key=lambda name: -targets[name].nbytes)
    return [
        Job(name, targets[name].nbytes, partial(weights.read_into, name, targets[name], part=parts.get(name)))
        for name in largest_first
    ]


def _pieces(
    weights: WeightSource, targets: Mapping[str, Tensor], staging: Staging, parts: Mapping[str, StoredPart]
) -> Iterator[Job]:
    for name in weights.shapes:
        if (target := targets.get(name)) is None:
            continue
        dtype = _narrower(weights.dtype(name), target.dtype)
        rows = staging.buffer_bytes // (target[0].numel() * dtype.itemsize)
        for start in range(0, len(target), rows):
            piece = target[start : start + rows]
            read = partial(weights.read_into, name, first_row=start, part=parts.get(name))
            yield Job(name, piece.nbytes, partial(staging.write, piece, dtype, read))


def _narrower(stored: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Returns the dtype of the copy: the host converts to fewer bytes, the device does all other conversion."""
    return stored if stored.itemsize <= target.itemsize else target
