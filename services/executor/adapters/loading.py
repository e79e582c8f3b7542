"""Reads an adapter and fits it to the model, on a thread of its own or at the start, on all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import grpc
import torch

from pagewire.config import ExecutorConfig
from pagewire.config.values.adapters import lora_modules
from pagewire.errors import StartupError
from pagewire.services.executor.adapters.checkpoint import read_adapter
from pagewire.services.executor.adapters.fitting import adapted_layers
from pagewire.services.executor.adapters.host import HostAdapter, HostAdapters
from pagewire.services.executor.adapters.low_rank import AdapterError
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.device import memory
from pagewire.services.executor.models.protocol import Model, OwnModel
from pagewire.services.executor.parallel.group import ALONE_GROUP, LEADER, Group
from pagewire.v1.common_pb2 import Adapter
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# Reads an adapter for the slots of a runner. Raises the same errors as `load_adapter`.
Read = Callable[[AdapterSlots, Adapter], HostAdapter]


def load_adapter(slots: AdapterSlots, wanted: Adapter, group: Group = ALONE_GROUP) -> HostAdapter:
    """Reads the adapter at wanted.path, on all ranks of the group at the same time.

    Raises:
        FileNotFoundError: nothing is there.
        RpcError: FAILED_PRECONDITION, it has another digest than the wanted one.
        AdapterError, OSError: it cannot be served.
        StartupError: another rank cannot read it, or has other contents.
        RankLost
    """
    try:
        adapter, error = _read(slots, wanted), None
    except Exception as raised:
        adapter, error = None, raised
    group.without_error(error)
    assert adapter is not None
    group.check_same_read("contents of the adapter", adapter.digest)
    return adapter


def _read(slots: AdapterSlots, wanted: Adapter) -> HostAdapter:
    path = Path(wanted.path)
    if not path.exists():
        where = f"nothing is at {wanted.path:.200} on the executor's machine"
        if path.is_absolute():
            raise FileNotFoundError(f"{where}; copy the adapter to it")
        raise FileNotFoundError(f"{where}, and nothing is downloaded; name the folder of an adapter by its full path")
    files = read_adapter(path, slots.heads)
    if wanted.digest not in ("", files.digest):
        raise RpcError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{path} has other contents than when the adapter was loaded; restore its files, or load it again",
        )
    return slots.fit(files)


def described(wanted: Adapter, adapter: HostAdapter) -> Adapter:
    """Returns the adapter with every field filled in."""
    return Adapter(
        name=wanted.name,
        path=wanted.path,
        digest=adapter.digest,
        rank=adapter.rank,
        base_model=wanted.base_model or adapter.base_model,
        number=wanted.number,
    )


def make_slots(config: ExecutorConfig, model: Model, device: torch.device, group: Group = ALONE_GROUP) -> AdapterSlots:
    """Allocates the slots that the flags ask for, and reads the adapters that they name. Raises StartupError."""
    _check_model(model)
    assert isinstance(model, OwnModel)
    most = config.max_cpu_loras if group.rank == LEADER else None  # the leader says what the others forget
    slots = AdapterSlots(model, config.max_loras, config.max_lora_rank, device, HostAdapters(most))
    with_experts = config.lora_experts
    for wanted in lora_modules(config.lora_modules or ""):
        adapter = Adapter(name=wanted.name, path=wanted.path, base_model=wanted.base_model)
        try:
            found = load_adapter(slots, adapter, group)
        except (AdapterError, OSError) as error:
            raise StartupError(f"--lora-modules {wanted.name}: {error}") from error
        slots.host.keep(found)
        slots.host.give(described(adapter, found))
        with_experts |= found.has_experts
    _allocate(slots, with_experts, device)
    return slots


def _allocate(slots: AdapterSlots, with_experts: bool, device: torch.device) -> None:
    of_experts = slots.num_bytes(of_experts=True)
    size = slots.num_bytes(of_experts=False) + with_experts * of_experts
    what = f"{slots.num_slots} adapters (--max-loras) of ranks up to {slots.max_rank} (--max-lora-rank)"
    if size > (free := memory.available_bytes(device)):
        raise memory.OutOfMemoryError(
            f"{what} take {memory.mib(size)}, and {memory.mib(free)} are free; lower one of them"
        )
    slots.allocate(with_experts=with_experts)
    note = ""
    if of_experts:
        note = f", {memory.mib(of_experts)} of them for experts" if with_experts else ", none of them for experts"
    logger.info("slots of %s take %s%s", what, memory.mib(size), note)


def _check_model(model: Model) -> None:
    """Refuses models that take no adapters."""
    name = model.config.architecture
    if not isinstance(model, OwnModel):
        raise StartupError(
            f"--enable-lora: {name} runs in transformers' code, which takes no adapters; leave it out, or merge the "
            "adapter into the weights of the model"
        )
    if not model.generates:
        raise StartupError(
            f"--enable-lora: {name} is an encoder, which takes no adapters; leave it out, or merge the adapter into "
            "the weights of the model"
        )
    if not adapted_layers(model) and not hasattr(model, "stage"):
        raise StartupError(f"--enable-lora: no layer of {name} takes adapters; leave it out")
