"""Random weights: a model's memory and speed without its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

STD = 0.02  # as transformers initialises: keeps activations and logits finite through any depth


def fill_random(targets: Mapping[str, Tensor], seed: int) -> None:
    """Norm weights become 1, everything else normal noise; the same seed gives the same weights per device type."""
    generators = {target.device: torch.Generator(target.device).manual_seed(seed) for target in targets.values()}
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(0.0, STD, generator=generators[target.device])
