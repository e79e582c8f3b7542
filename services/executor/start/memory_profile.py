"""The CUDA memory that serving takes apart from the KV cache: measured by running the largest steps, then kept.

A measurement takes seconds (compilation, a step of all tokens, captures of two sizes) and depends only on the model's
files, the flags, the device and the software. The profile is kept under a key of all these in `profiles/` of the user's
cache directory; the next start with the same key reads it. Delete the folder to measure again.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

import pagewire
from pagewire.config.sampling_params import with_defaults
from pagewire.files.models import cache_directory
from pagewire.kernels import ops as kernel_ops
from pagewire.services.executor.device.memory import DeviceMemory, cuda_memory, mib
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Record, cuda_recorder
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.graph_capture import capture_shapes, fill, num_graphs, shapes_of
from pagewire.services.executor.start.kv_cache_size import MemoryProfile, graphs_bytes
from pagewire.services.executor.step.step import MAX_LOGPROBS
from pagewire.v1.common_pb2 import SamplingParams

logger = logging.getLogger(__name__)

# Every feature of a sampled token that takes memory.
COSTLY_SAMPLING = with_defaults(
    SamplingParams(
        seed=0,
        top_k=50,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logit_bias_ids=[0],
        logit_bias_values=[1.0],
        logprobs=MAX_LOGPROBS,
    )
)
# In addition to the usual cost of a prompt's step.
COSTLY_PROMPT = with_defaults(SamplingParams(seed=0, prompt_logprobs=MAX_LOGPROBS))
# Code and workspaces of libraries take less; if it is more, another process took memory meanwhile.
_MAX_LIBRARY_BYTES = 2 * 1024**3


class Meter(Protocol):
    """Reads a device's memory."""

    def now(self) -> DeviceMemory: ...

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        """Returns torch's peak of allocated bytes since `reset_peak()`."""

    def release(self) -> None:
        """Returns unused memory to the device."""

    def key(self) -> dict[str, Any]:
        """Returns the properties of device and software that memory depends on."""


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> DeviceMemory:
        torch.cuda.synchronize(self._device)
        return cuda_memory(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def key(self) -> dict[str, Any]:
        return software_key() | {
            "device": torch.cuda.get_device_name(self._device),
            "total_bytes": torch.cuda.get_device_properties(self._device).total_memory,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }


def profile_run(runner: ModelRunner) -> None:
    """Runs the largest possible steps: all rows and tokens, every feature of the sampler, a request of full length,
    images without text between them, adapters."""
    limits, run = runner.limits, partial(runner.dummy_run, has_adapters=runner.adapters.num_slots > 0)
    for num_tokens in (limits.max_num_batched_tokens, limits.max_num_seqs):
        run(limits.max_num_seqs, num_tokens, context_len=limits.max_model_len, sampling=COSTLY_SAMPLING)
    run(1, limits.max_num_batched_tokens, sampling=COSTLY_PROMPT)
    if 0 < runner.smallest_image < limits.max_model_len:
        run(1, limits.max_num_batched_tokens, context_len=limits.max_model_len, with_images=True)
    if most := runner.max_draft_tokens:
        run(limits.max_num_seqs, limits.max_num_seqs * (1 + most), sampling=COSTLY_SAMPLING, num_draft_tokens=most)


def measure(
    runner: ModelRunner,
    sizes: Sequence[int],
    meter: Meter,
    recorder: Callable[[], Record] = cuda_recorder,
    prompts: Sequence[int] = (),
) -> MemoryProfile:
    """Measures the memory of a runner with one block of KV cache. sizes, prompts: see `capture_graphs`; here the two
    largest graphs are captured; with adapters the third one too, as the second has none."""
    before = meter.now()
    meter.reset_peak()
    profile_run(runner)
    peak = meter.peak()
    library_bytes = max(0, meter.now().outside_torch - before.outside_torch)
    shapes, taken = shapes_of(runner, sizes, prompts), []
    captured = shapes[: 3 if runner.adapters.num_slots else 2]
    record, graphs = recorder() if shapes else None, CudaGraphs()
    for shape in captured:
        fill(runner, shape)  # memory reserved here does not count as the graphs'
    for shape in captured:
        # Capturing releases the memory that torch keeps of earlier steps, which would distort the graphs' share.
        meter.release()
        free = meter.now().free
        capture_shapes(runner, [shape], lambda fraction, text: None, record, graphs)
        meter.release()
        taken.append(free - meter.now().free)
    largest, *others = taken or [0]
    another = max(others, default=0)
    return MemoryProfile(peak, library_bytes, graphs_bytes(largest, another, num_graphs(runner, sizes, prompts)))


def cached_or_measured(
    key: Mapping[str, Any],
    measure: Callable[[], MemoryProfile],
    directory: Path | None = None,
    all_have: Callable[[bool], bool] = bool,
) -> tuple[MemoryProfile, bool]:
    """Returns the profile of `key`, and whether it existed already. Read and write errors are logged once.

    all_have: tells whether every rank of a group has its profile, given whether this rank has: ranks measure
    together, in steps that all of them take, or not at all.
    """
    canonical = json.dumps(key, sort_keys=True, default=str)
    name = f"{hashlib.sha256(canonical.encode()).hexdigest()[:32]}.json"
    path = (directory or cache_directory() / "profiles") / name
    known = _read(path, json.loads(canonical))
    if all_have(known is not None) and known is not None:
        return known, True
    profile = measure()
    if profile.library_bytes > _MAX_LIBRARY_BYTES:
        logger.warning(
            "another process seems to have taken memory of the device while it was measured (%s): the KV cache is "
            "smaller for it, and the next start measures again",
            mib(profile.library_bytes),
        )
    else:
        _write(path, {"key": json.loads(canonical), "profile": dataclasses.asdict(profile)})
    return profile, False


def _read(path: Path, key: dict[str, Any]) -> MemoryProfile | None:
    try:
        content = json.loads(path.read_text())
        if content["key"] != key:
            raise ValueError("it has another key")
        profile = MemoryProfile(**content["profile"])
        if not all(type(value) is int and value >= 0 for value in dataclasses.astuple(profile)):
            raise ValueError("its values are not sizes")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.info("memory profile %s is not used, so memory is measured again: %s", path, error)
        return None
    return profile


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1))
        part.replace(path)
    except OSError as error:
        logger.info("memory profile is not kept, so the next start measures again: %s", error)


def software_key() -> dict[str, Any]:
    """Returns our version and the last change of our code and tables: a checkout changes without its version."""
    folders = (Path(__file__).parents[1], Path(kernel_ops.__file__).parents[1])
    files = (path for folder in folders for kind in ("*.py", "*.json") for path in folder.rglob(kind))
    changed = max(path.stat().st_mtime_ns for path in files)
    return {"pagewire": pagewire.__version__, "changed_ns": changed}
