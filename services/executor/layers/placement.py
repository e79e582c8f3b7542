"""The placement of a layer's weights: device, precision, names in the checkpoint, and ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.services.executor.layers.weight_format import Quantization, WeightFormat
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from pagewire.services.executor.parallel.stage import WHOLE, Stage


@dataclass(frozen=True)
class Placement:
    """`prefix` is the checkpoint's name of the module being built, with a dot at its end; empty for the model."""

    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    prefix: str = ""
    tensor: Communicator = ALONE  # with the ranks that have the other parts of each layer
    whole_experts: bool = False  # each rank has some whole experts; otherwise a part of every expert
    stage: Stage = WHOLE  # the layers of this rank

    def within(self, module: str) -> Placement:
        return replace(self, prefix=f"{self.prefix}{module}.")

    def where(self, is_here: bool) -> Placement:
        """Returns the placement of a module; one that is not on this stage takes no memory and has no weights."""
        return self if is_here else replace(self, device=torch.device("meta"))

    def name(self, module: str) -> str:
        return self.prefix + module

    def format(self, module: str) -> WeightFormat | None:
        return None if self.quantization is None else self.quantization.format(self.name(module))

    def empty(self, *shape: int) -> Tensor:
        """Memory for a weight that the loader fills."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
