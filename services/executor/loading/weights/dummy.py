"""Random weights: a model's memory and speed without its checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from pagewire.services.executor.layers.parts import StoredPart, select

STD = 0.02  # as transformers initialises: keeps activations and logits finite through any depth


def fill_random(targets: Mapping[str, Tensor], seed: int, parts: Mapping[str, StoredPart] | None = None) -> None:
    """Fills norm weights with 1, others with normal noise: a function of seed, name and type of device.

    parts: the parts of targets that are not whole. All ranks make the same tensors, and each keeps its part.
    """
    for name, target in targets.items():
        generator = torch.Generator(target.device).manual_seed(seed ^ zlib.crc32(name.encode()))
        part = (parts or {}).get(name)
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        elif part is None:
            target.normal_(0.0, STD, generator=generator)
        else:
            whole = torch.empty(part.shape, dtype=target.dtype, device=target.device)
            target.copy_(select(whole.normal_(0.0, STD, generator=generator), part.index))
