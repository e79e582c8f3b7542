"""Messages as vLLM's batches of events: maps that msgpack encodes, with the fields of vLLM 0.32."""

from collections.abc import Sequence
from typing import Any

from pagewire.v1.admin_pb2 import KvBlocksStored, KvEvent, SubscribeKvEventsResponse

_DEVICE = "GPU"  # vLLM's name of the memory where blocks are computed, on any device
_HASH_BITS = 64

Batch = tuple[float, Sequence[dict[str, Any]], int]


def batch_of(message: SubscribeKvEventsResponse) -> Batch:
    """Returns the time, the events and the number of the replica."""
    return message.time, [_event(event) for event in message.events], rank_of(message)


def rank_of(message: SubscribeKvEventsResponse) -> int:
    """Returns the number of the replica, from its name, such as "executor-0"."""
    return int(message.executor.name.rpartition("-")[2])


def short_hash(block_hash: bytes) -> int:
    """Returns the number that stands for a hash, as vLLM shortens it by default."""
    return int.from_bytes(block_hash, "big") & ((1 << _HASH_BITS) - 1)


def _event(event: KvEvent) -> dict[str, Any]:
    if event.HasField("stored"):
        return _stored(event.stored)
    if event.HasField("removed"):
        return {
            "type": "BlockRemoved",
            "block_hashes": [short_hash(one) for one in event.removed.hashes],
            "medium": _DEVICE,
            "group_idx": event.removed.group,
        }
    return {"type": "AllBlocksCleared"}


def _stored(stored: KvBlocksStored) -> dict[str, Any]:
    kind = "mamba" if stored.is_state else "sliding_window" if stored.window else "full_attention"
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [short_hash(one) for one in stored.hashes],
        "parent_block_hash": short_hash(stored.parent_hash) if stored.parent_hash else None,
        "token_ids": list(stored.token_ids),
        "block_size": stored.block_size,
        "lora_id": None,
        "medium": _DEVICE,
        "lora_name": stored.adapter_name or stored.adapter_digest or None,
        "group_idx": stored.group,
        "kv_cache_spec_kind": kind,
    }
    if stored.window:
        event["kv_cache_spec_sliding_window"] = stored.window
    if any(keys := _extra_keys(stored)):
        event["extra_keys"] = keys
    return event


def _extra_keys(stored: KvBlocksStored) -> Sequence[Sequence[str] | None]:
    """Returns what each block depends on besides its tokens: the adapter, in the first block of a prompt the tenant and
    salt, and images."""
    found: list[list[str] | None] = []
    for i in range(len(stored.hashes)):
        keys = [stored.adapter_name or stored.adapter_digest] if stored.adapter_digest else []
        if stored.namespace and i == 0 and not stored.parent_hash:
            keys.append(stored.namespace.hex())
        if stored.extra_keys and stored.extra_keys[i]:
            keys.append(stored.extra_keys[i].hex())
        found.append(keys or None)
    return found
