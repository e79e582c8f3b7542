"""Fills a model's memory, from a checkpoint or with random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pagewire.kernels.quantized import PackedWeight
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.layers.weights import Shard, WeightModule
from pagewire.services.executor.loading.offload import NOTHING, Offload, modules_of, to_host
from pagewire.services.executor.loading.quantization.install import (
    Installed,
    install_jobs,
    num_weights,
    random_shards,
    stored_shards,
    tensor_specs,
)
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.dummy import fill_random
from pagewire.services.executor.loading.weights.jobs import run_jobs
from pagewire.services.executor.loading.weights.read import read_jobs, staging_for
from pagewire.services.executor.models.protocol import OwnModel

MAX_THREADS = {"cpu": 4, "cuda": 8}  # that read weights; a device waits for pages to be mapped, so more threads help


@dataclass(frozen=True)
class Filler:
    """Fills a model that has uninitialized tensors and lacks its quantized weights."""

    model: OwnModel
    device: torch.device
    dequantize: bool
    num_threads: int
    progress: Progress
    offload: Offload = NOTHING

    def read(self, path: Path, weights: WeightSource) -> None:
        """Fills a model. weights: of the checkpoint at `path`."""
        targets = self.model.load_targets()
        staging = staging_for(self.device, self.num_threads, targets)
        jobs = read_jobs(weights, targets, staging, self.model.stored_parts())
        read = stored_shards(path, weights, self.model.config.dtype, self.device)
        jobs += install_jobs(self._quantized(), read, partial(stored_bytes, weights), self._dense())
        run_jobs(jobs, self.num_threads, self.progress)
        if staging is not None:
            staging.finish()

    def fill_randomly(self, seed: int) -> None:
        fill_random(self.model.load_targets(), seed, self.model.stored_parts())
        read = random_shards(seed, self.model.config.dtype, self.device)
        jobs = install_jobs(self._quantized(), read, num_weights, self._dense())
        run_jobs(jobs, self.num_threads, self.progress)
        self.progress(1.0, "random weights")

    def _quantized(self) -> list[Installed]:
        on_host = modules_of(self.model, self.offload)
        return [_OnHost(it) if id(it) in on_host else it for it in self.model.quantized_modules()]

    def _dense(self) -> Callable[[int, int], Tensor] | None:
        """Returns memory for dequantized weights, if they are dequantized."""
        return partial(torch.empty, dtype=self.model.config.dtype, device=self.device) if self.dequantize else None


@dataclass(frozen=True)
class _OnHost:
    """A module with a weight that leaves the device as soon as it is packed."""

    module: WeightModule

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.module.shards

    def install(self, parts: Sequence[PackedWeight]) -> None:
        for part in parts:
            to_host(part)
        self.module.install(parts)


def stored_bytes(weights: WeightSource, shard: Shard) -> int:
    suffixes = ("weight",) if shard.format is None else tensor_specs(shard)
    names = [name for suffix in suffixes if (name := f"{shard.name}.{suffix}") in weights.shapes]
    return int(sum(map(weights.stored_bytes, names)) * shard.share)
