"""The start of tiers: from flags and a runner to tiers of its blocks."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc

from pagewire.config import ExecutorConfig
from pagewire.config.values.kv_transfer import role_of
from pagewire.errors import StartupError
from pagewire.files.models import find_model
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.parallel.group import ALONE_GROUP, Group
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.runner.wrapping_runner import WrappingRunner
from pagewire.services.executor.service.seams import TierCalls
from pagewire.services.executor.start.startup import start_runner
from pagewire.services.executor.tiers.copies import BlockCopies, DeviceCopies, HostCopies
from pagewire.services.executor.tiers.directory import Directory
from pagewire.services.executor.tiers.disk import DiskTier
from pagewire.services.executor.tiers.host import GroupSize, HostBlocks, slots_of
from pagewire.services.executor.tiers.joined import OtherRanks, WholeSizes
from pagewire.services.executor.tiers.rates import of_memory
from pagewire.services.executor.tiers.runner import TieredRunner
from pagewire.services.executor.tiers.served import NoTiers, ServedTiers
from pagewire.services.executor.tiers.shared import Memory
from pagewire.services.executor.tiers.tiers import Tiers
from pagewire.wire import rpc

logger = logging.getLogger(__name__)

# Of the layout of blocks, and of what the kernels write to them.
_LAYOUT = 1
# Memory that blocks pass on their way to and from the disk, if there is no host tier.
_STAGING_BYTES, _LEAST_STAGED = 64 * 1024**2, 8
_GIB = 1024**3
# The most that an executor of prompts gives by default to those that decode.
_FOR_OTHERS_BYTES = _GIB


def start_tiered(
    config: ExecutorConfig, model_path: str, progress: Progress, group: Group = ALONE_GROUP
) -> tuple[Runner, ExecutorInfo]:
    """Starts a runner as `start_runner` does, with tiers if its model generates."""
    runner, info = start_runner(config, model_path, progress, group)
    if runner.pooling.generates and runner.kv_caches:
        return with_tiers(config, runner, group), info
    return runner, info


def with_tiers(config: ExecutorConfig, runner: ModelRunner, group: Group = ALONE_GROUP) -> TieredRunner:
    """Returns the runner with the tiers of the flags. group: the ranks, each of which calls this function and keeps its
    part of a block. Raises StartupError or RankLost."""
    caches = runner.kv_caches[: len(runner.kv_groups)]
    groups = [GroupSize(len(cache), cache[0].nbytes) for cache in caches]
    copies: BlockCopies = HostCopies(caches) if memory.is_shared(runner.device) else DeviceCopies(caches)
    host_bytes = _host_bytes(config, sum(cache.nbytes for cache in caches), group)
    num_slots = slots_of(host_bytes or _STAGING_BYTES, groups, _LEAST_STAGED)
    block_bytes = [one.block_bytes for one in groups]
    slots = Memory(num_slots, block_bytes)
    if isinstance(copies, DeviceCopies) and (host_bytes or config.kv_offloading_dir or role_of(config) != "both"):
        copies.pin(slots.bytes)
    host = HostBlocks(slots, is_tier=host_bytes > 0)
    disk = None
    if config.kv_offloading_dir is not None:
        directory = _directory(config.kv_offloading_dir, config.kv_offloading_dir_size, block_bytes)
        disk = DiskTier(directory, host, max_queued=max(host.num_bytes // 4, _STAGING_BYTES))
    tiers = Tiers(copies, host, disk, block_bytes, WholeSizes.of(group, block_bytes, host.num_bytes))
    if host.is_tier:
        if memory.is_shared(runner.device):
            tiers.host_rate = of_memory()
        logger.info("copies of KV blocks: %s of host memory, for %s blocks", memory.mib(host.num_bytes), num_slots)
    if disk is not None:
        size = memory.mib(disk.directory.max_bytes)
        logger.info("copies of KV blocks: up to %s in %s", size, config.kv_offloading_dir)
    return TieredRunner(runner, tiers)


def _directory(path: str, gib: float, block_bytes: list[int]) -> Directory:
    """Returns the directory of blocks, which is made. Raises StartupError if it cannot be, or holds too little; one
    that is full or read only for now costs blocks, and nothing else."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"--kv-offloading-dir: {path} is no directory and cannot be made one ({error.strerror}); name another"
        ) from error
    if (max_bytes := int(gib * _GIB)) < (least := _LEAST_STAGED * sum(block_bytes)):
        raise StartupError(
            f"--kv-offloading-dir-size {gib:g}: a KV block of this model takes {memory.mib(sum(block_bytes))}; give at "
            f"least {math.ceil(least / _GIB * 1e4) / 1e4:g}, for {_LEAST_STAGED} blocks"
        )
    return Directory(path, max_bytes, block_bytes)


def _host_bytes(config: ExecutorConfig, cache_bytes: int, group: Group) -> int:
    """Returns the size of this rank's part of the host tier. Raises StartupError if there is no memory for all parts on
    this machine."""
    available = memory.available_cpu_bytes() // group.num_local
    if config.kv_offloading_size > 0:
        if (wanted := int(config.kv_offloading_size * _GIB / group.size)) > available:
            raise StartupError(
                f"--kv-offloading-size {config.kv_offloading_size:g}: this machine has "
                f"{memory.mib(available * group.num_local)} free; lower it"
            )
        return wanted
    if config.swap_space > 0:
        return min(int(config.swap_space * _GIB / group.size), available // 4)
    return min(cache_bytes, _FOR_OTHERS_BYTES, available // 4) if role_of(config) == "prefill" else 0


def served_tiers(
    config: ExecutorConfig,
    runner: Runner,
    channel: Callable[[str], grpc.aio.Channel] = rpc.channel,
    others: OtherRanks | None = None,
) -> TierCalls:
    """Returns the calls about the tiers of a runner, which may have none. channel: makes one to another executor.
    others: the other ranks of this one."""
    tiered = runner
    while isinstance(tiered, WrappingRunner) and not isinstance(tiered, TieredRunner):
        tiered = tiered.inner
    if isinstance(tiered, TieredRunner):
        return ServedTiers(tiered, model_digest(config, runner), channel, others)
    if config.kv_offloading_size or config.kv_offloading_dir or config.swap_space:
        logger.warning("this executor keeps no copies of KV blocks: its model generates nothing")
    return NoTiers()


def model_digest(config: ExecutorConfig, runner: Runner) -> str:
    """Returns a digest of everything but the weights that the contents of a block depend on."""
    facts: dict[str, Any] = {
        "layout": _LAYOUT,
        "config": _config_text(config),
        "overrides": config.hf_overrides,
        "implementation": [config.model_impl, config.quantization],
        "dtype": str(runner.model.config.dtype),
        "longest": runner.limits.max_model_len,  # by it, some models scale the rotation of keys
        "groups": [
            (type(spec).__name__, asdict(spec), [layer.layer_idx for layer in layers])
            for spec, layers in kv_cache.groups(runner.model).items()
        ],
        "blocks": [runner.limits.block_size, runner.limits.state_tokens],
        "device": runner.device.type,
    }
    if config.num_ranks > 1:
        facts["ranks"] = [config.tensor_parallel_size, config.pipeline_parallel_size]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _config_text(config: ExecutorConfig) -> str:
    path = Path(find_model(config))
    file = path / "config.json"
    return file.read_text() if path.is_dir() and file.exists() else ""
