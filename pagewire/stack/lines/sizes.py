"""The memory of lines: measured while they run, kept for the plans of later stacks, and estimated before that."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire import flags
from pagewire.config import ExecutorConfig, ServeConfig
from pagewire.config.profiles import runs_on_cuda
from pagewire.files.model_files import weight_files
from pagewire.files.models import cache_directory
from pagewire.flags.costs import kv_bytes_per_token
from pagewire.flags.model_facts import ModelFacts, facts_of
from pagewire.process import cgroup

logger = logging.getLogger(__name__)

_MIB, _GIB = 2**20, 2**30
# What the processes of a line take without weights and KV cache, awake and asleep: measured on Linux.
_PROCESSES_READY, _PROCESSES_ASLEEP = 700 * _MIB, 550 * _MIB
_CONTEXT_ON_CUDA = 600 * _MIB  # of a process that sleeps
_UNKNOWN_WEIGHTS = 1 * _GIB  # of files that are not on this machine yet
_CACHED_TOKENS = 4096  # of the KV cache, which is touched as it is used
_KEPT = 1000  # sizes of lines in the file
_DEVICE_0 = 0


@dataclass(frozen=True)
class Sizes:
    """Bytes of a line's memory while it is ready and while it sleeps."""

    ready: int
    asleep: int
    is_measured: bool = False


def measured(pids: Collection[int]) -> int:
    """Returns the bytes of memory of these processes and of those that they started, which are in their sessions. What
    several processes share counts in parts. 0: the kernel does not say."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError):  # it has ended
                if os.getsid(int(folder.name)) in pids:
                    total += _pss(folder)
    return total


def _pss(process: Path) -> int:
    for line in (process / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def weights_size(config: ServeConfig, facts: ModelFacts | None) -> int:
    """Returns the bytes of the weights on disk; 0: they are not on this machine, or there are none."""
    if facts is None or config.load_format == "dummy":
        return 0
    with suppress(OSError):
        return sum(file.stat().st_size for file in weight_files(facts.path))
    return 0


def facts(config: ServeConfig) -> ModelFacts | None:
    """Returns what the files of the model say; None if they are not on this machine."""
    return facts_of(config.model, config.download_dir, config.revision, config.gguf)


def estimated(config: ServeConfig) -> Sizes:
    """Returns sizes that follow from the files of the model, the form of its weights and the flags."""
    if runs_on_cuda(config.device):
        return Sizes(int(config.gpu_memory_utilization * (device_memory() or 0)), _CONTEXT_ON_CUDA, is_measured=True)
    found = facts(config)
    weights = float(weights_size(config, found) or _UNKNOWN_WEIGHTS)
    if found is not None and config.quantization == "none" and found.bits:
        weights *= max(1.0, (32 if config.dtype == "float32" else 16) / found.bits)
    per_token = 0 if found is None else kv_bytes_per_token(config, found)
    cache = config.kv_cache_memory_bytes or per_token * _CACHED_TOKENS
    executors = config.data_parallel_size
    return Sizes(int(weights + cache) * executors + _PROCESSES_READY, _PROCESSES_ASLEEP)


def machine_memory() -> int:
    """Returns the bytes of memory of this machine, or of this container or unit if its limit is lower."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = [int(fields["MemTotal"].split()[0]) * 1024]
    for group in cgroup.groups("memory", Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # of the other version, or without a limit
                found.append(int((group / name).read_text()))
    return min(found)


def room(config: ServeConfig, total: int) -> int:
    """Returns the bytes that all lines together may take. total: those of this machine or container."""
    if config.models_memory is not None:
        return config.models_memory
    if runs_on_cuda(config.device) and (of_device := device_memory()) is not None:
        return of_device
    return int(0.9 * total)


def device_memory() -> int | None:
    """Returns the bytes of memory of the first CUDA device; None if the driver does not say."""

    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, memory = ctypes.c_void_p(), Memory()
    if library.nvmlInit_v2() != 0:
        return None
    try:
        if library.nvmlDeviceGetHandleByIndex_v2(_DEVICE_0, ctypes.byref(device)) != 0:
            return None
        if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
            return None
        return int(memory.total)
    finally:
        library.nvmlShutdown()


class KeptSizes:
    """The sizes that were measured, by model and flags, in a file of the cache directory."""

    def __init__(self, path: Path | None = None) -> None:
        """path: of the file; None: in Pagewire's cache directory."""
        self._path = path or cache_directory() / "lines.json"
        self._writing = threading.Lock()

    def of(self, config: ServeConfig) -> Sizes | None:
        """Returns the sizes of a line; None if it was never measured."""
        entry: Any = self._read().get(_key(config))
        try:
            return Sizes(int(entry["ready"]), int(entry["asleep"]), is_measured=True)
        except (TypeError, KeyError, ValueError):
            return None

    def keep(self, config: ServeConfig, sizes: Sizes) -> None:
        """Writes the sizes of a line. A file that cannot be written costs only better estimates; the log has it."""
        with self._writing:
            entries = self._read()
            entries.pop(_key(config), None)
            entries = dict(list(entries.items())[-_KEPT + 1 :])
            entries[_key(config)] = {"ready": sizes.ready, "asleep": sizes.asleep, "model": config.model}
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix=".lines-", delete=False) as file:
                    try:
                        file.write(json.dumps(entries))
                        file.flush()
                        Path(file.name).replace(self._path)
                    except OSError:  # the disk is full: each attempt would leave a file
                        Path(file.name).unlink()
                        raise
            except OSError as error:
                logger.debug("sizes of lines are not kept: %s", error)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def _key(config: ServeConfig) -> str:
    """Returns the name of a line among kept sizes: it follows from the model's files and the flags of its executor."""
    executor = config.part(ExecutorConfig, model="", listen="", metrics_port=None)
    model = Path(config.model).expanduser()
    state = [0, 0]
    with suppress(OSError):
        state = [model.stat().st_size, int(model.stat().st_mtime)]
    text = json.dumps([config.model, *state, config.data_parallel_size, *flags.to_argv(executor)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
