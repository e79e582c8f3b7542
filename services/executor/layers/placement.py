"""The placement of a layer's weights: device, precision, names in the checkpoint, and ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels import ops
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
    results: torch.dtype | None = None  # of products; None: dtype
    inputs: torch.dtype | None = None  # of products; None: dtype
    host_layers: frozenset[int] = frozenset()  # numbers of layers that are loaded to host memory

    @property
    def result_dtype(self) -> torch.dtype:
        return self.results or self.dtype

    @property
    def input_dtype(self) -> torch.dtype:
        return self.inputs or self.dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        """Returns the dtype of the residual stream: fp32, whatever the results that are added to it."""
        return torch.float32

    def widened(self) -> Placement:
        """Returns the placement with everything in fp32 that costs no time in it: on CPUs, what products give and what
        is computed of that; and what they take, unless a matrix unit rounds it. On GPUs, results would take longer to
        write and read."""
        if self.device.type != "cpu" or self.dtype is torch.float32 or ops.cpu_backend() not in ("cpp", "torch"):
            return self
        inputs = None if self._rounds_inputs() else torch.float32
        return replace(self, results=torch.float32, inputs=inputs)

    def narrowed(self) -> Placement:
        """Returns the placement of layers between which ops take nothing but dtype."""
        return replace(self, results=None, inputs=None)

    def _rounds_inputs(self) -> bool:
        if self.dtype is not torch.bfloat16 or ops.cpu_backend() != "cpp":
            return True
        from pagewire.kernels.cpu.products.packed_linear import rounds_inputs

        return rounds_inputs()

    def within(self, module: str) -> Placement:
        inner = replace(self, prefix=f"{self.prefix}{module}.")
        if not self.host_layers or not (number := module.rpartition(".")[2]).isdigit():
            return inner
        device = torch.device("cpu") if int(number) in self.host_layers else self.device
        return replace(inner, device=device, host_layers=frozenset())

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
