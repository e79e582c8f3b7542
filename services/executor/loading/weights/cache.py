"""Weights in the layout of a device, kept on disk: the next start maps them instead of packing them again.

`--weights-cache` names the directory. An entry is one file per checkpoint, device type, dtype and `--quantization none`
or not; it records the files and the code that it was made from, and is made again when either changes. On a CPU the
weights are views of the mapped file: processes that serve the same model share its memory.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pagewire
from pagewire.files.models import cache_directory
from pagewire.kernels.ops import cpu_backend
from pagewire.kernels.quantized import PackedFp8, PackedGrouped, PackedInt8, PackedWeight
from pagewire.services.executor.device.memory import mib
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.layers.weights import Dense, PackedDense
from pagewire.services.executor.loading.weights import tensor_file
from pagewire.services.executor.loading.weights.identity import code_digest, model_key
from pagewire.services.executor.loading.weights.jobs import Job, run_jobs
from pagewire.services.executor.loading.weights.pack_dense import dense_layout
from pagewire.services.executor.loading.weights.staging import Staging, cuda_staging
from pagewire.services.executor.loading.weights.tensor_file import TensorFileError, as_bytes
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from pagewire.services.executor.parallel.stage import WHOLE, Stage

logger = logging.getLogger(__name__)

_PARTS: dict[str, Any] = {cls.__name__: cls for cls in (Dense, PackedDense, PackedGrouped, PackedInt8, PackedFp8)}
_STAGING_BYTES = 8 << 20
_ABANDONED_S = 600  # a file in progress changes more often


@dataclass(frozen=True)
class WeightsCache:
    """One entry."""

    path: Path
    key: dict[str, Any]
    device: torch.device

    @classmethod
    def at(
        cls,
        directory: str,
        checkpoint: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        dequantize: bool,
        overrides: Mapping[str, Any],
        tensor: Communicator = ALONE,
        whole_experts: bool = False,
        stage: Stage = WHOLE,
    ) -> WeightsCache:
        """The cache of packed weights. directory: "auto" is `weights/` of the user's cache directory. overrides: of the
        checkpoint's config. tensor, whole_experts, stage: of the placement; each rank has a separate entry."""
        folder = cache_directory() / "weights" if directory == "auto" else Path(directory).expanduser()
        on_cpu = device.type == "cpu" and cpu_backend() != "triton"
        choices: dict[str, Any] = {
            "layout": "cpu" if on_cpu else "cuda",
            "dtype": str(dtype),
            "dequantize": dequantize,
            "dense": dense_layout(dtype, device),
        }
        if tensor.size > 1:
            choices["rank"] = [tensor.rank, tensor.size]
        if whole_experts:
            choices["whole_experts"] = True
        if overrides:
            choices["overrides"] = dict(overrides)
        if stage.count > 1:
            choices["stage"] = dataclasses.asdict(stage)
        software = {"pagewire": pagewire.__version__, "code": code_digest()}
        key = {"checkpoint": model_key(checkpoint), "software": software, "choices": choices}
        name = f"{checkpoint.name}-{_digest(key['checkpoint']['path'])}-{_digest(choices)}.safetensors"
        return cls(folder / name, json.loads(json.dumps(key)), device)

    def load(self, model: OwnModel, num_threads: int, progress: Progress) -> bool:
        """Loads the weights; returns whether the model has them; if not, it is unchanged, and the log says why."""
        started = time.perf_counter()
        try:
            tensors, content = tensor_file.read(self.path)
            if content["key"] != self.key:
                logger.info("weights cache: %s is of other files or other code; it will be replaced", self.path)
                return False
            if self.device.type != "cpu":
                staging = cuda_staging(self.device, 2 * num_threads, _STAGING_BYTES)
                tensors = copied(tensors, self.device, staging, num_threads, progress)
            _install(model, tensors, content["modules"])
        except FileNotFoundError:
            return False
        except (OSError, TensorFileError, KeyError, TypeError, ValueError) as error:
            cause = f"{error} is missing" if isinstance(error, KeyError) else error
            logger.warning(
                "weights cache: %s cannot be used: %s; the checkpoint is read instead, and the entry is written anew",
                self.path,
                cause,
            )
            return False
        progress(1.0, self.path.name)
        logger.info("weights cache: %s mapped in %.2f s", self.path, time.perf_counter() - started)
        return True

    def save(self, model: OwnModel) -> None:
        """Keeps the weights of a loaded model; logs errors."""
        started, tensors = time.perf_counter(), {**model.vectors()}
        modules = {
            module.shards[0].name: [_described(part, f"{module.shards[0].name}.{i}", tensors) for i, part in parts]
            for module in model.modules()
            for parts in [enumerate(module.parts)]
        }
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_old()
            try:
                tensor_file.write(part, tensors, {"key": self.key, "modules": modules})
                part.replace(self.path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("weights cache: weights are not kept, so the next start packs them again: %s", error)
            return
        size, seconds = mib(self.path.stat().st_size), time.perf_counter() - started
        logger.info("weights cache: %s written to %s in %.2f s", size, self.path, seconds)

    def _remove_old(self) -> None:
        """Removes entries of this checkpoint that no start uses any longer, and files of writers that died."""
        prefix = self.path.name.rpartition("-")[0]
        for file in self.path.parent.glob(f"{glob.escape(prefix)}-*.part"):
            if time.time() - file.stat().st_mtime > _ABANDONED_S:
                file.unlink(missing_ok=True)
        for file in self.path.parent.glob(f"{glob.escape(prefix)}-*.safetensors"):
            if not self._is_current(file):
                file.unlink(missing_ok=True)
                if file != self.path:  # `load` has logged that one
                    logger.info("weights cache: %s is outdated and was removed", file)

    def _is_current(self, file: Path) -> bool:
        try:
            key = tensor_file.read(file)[1]["key"]
            return bool(key["checkpoint"] == self.key["checkpoint"] and key["software"] == self.key["software"])
        except (TensorFileError, KeyError, TypeError):
            return False


def copied(
    tensors: dict[str, Tensor], device: torch.device, staging: Staging, num_threads: int, progress: Progress
) -> dict[str, Tensor]:
    """The same tensors on a device."""
    arrived = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
    jobs = []
    for name, tensor in tensors.items():
        sources = as_bytes(tensor).split(staging.buffer_bytes)
        targets = as_bytes(arrived[name]).split(staging.buffer_bytes)
        for source, target in zip(sources, targets, strict=True):
            jobs.append(Job(name, len(source), partial(staging.write, target, torch.uint8, partial(_fill, source))))
    run_jobs(jobs, num_threads, progress)
    staging.finish()
    return arrived


def _fill(source: Tensor, staged: Tensor) -> None:
    staged.copy_(source)


def _described(part: PackedWeight, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A weight without its tensors, which are added to `tensors`."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            names[field.name] = f"{prefix}.{field.name}"
            tensors[names[field.name]] = value
        else:
            values[field.name] = value
    return {"type": type(part).__name__, "values": values, "tensors": names}


def _restored(described: dict[str, Any], tensors: dict[str, Tensor]) -> PackedWeight:
    """The inverse of `_described`."""
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in described["values"].items()}
    fields = {key: tensors[name] for key, name in described["tensors"].items()}
    part: PackedWeight = _PARTS[described["type"]](**values, **fields)
    return part


def _install(model: OwnModel, tensors: dict[str, Tensor], modules: dict[str, list[dict[str, Any]]]) -> None:
    """All or nothing. Raises KeyError, TypeError or ValueError if these are not the model's weights."""
    restored = [
        (module, [_restored(part, tensors) for part in modules[module.shards[0].name]]) for module in model.modules()
    ]
    for module, parts in restored:
        _check(module.shards[0].name, sum(s.num_outputs for s in module.shards), module.shards[0].num_inputs, parts)
    vectors = [(target, tensors[name]) for name, target in model.vectors().items()]
    for target, stored in vectors:
        if stored.shape != target.shape or stored.dtype != target.dtype:
            raise ValueError("a vector differs from the model's")
    for module, parts in restored:
        module.install(parts)
    for target, stored in vectors:
        target.copy_(stored)


def _check(name: str, num_outputs: int, num_inputs: int, parts: Iterable[PackedWeight]) -> None:
    shapes = [part.shape for part in parts]
    if sum(outputs for outputs, _ in shapes) != num_outputs or {inputs for _, inputs in shapes} != {num_inputs}:
        raise ValueError(f"{name} has the wrong shape")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
