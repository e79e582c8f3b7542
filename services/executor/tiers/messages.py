"""Blocks, saves and loads as messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from pagewire.services.executor.step.step import InvalidStep, Step
from pagewire.services.executor.tiers.contents import HASH_BYTES, Key
from pagewire.services.executor.tiers.loads import Load, Loaded
from pagewire.services.executor.tiers.runner import TieredStep
from pagewire.v1.executor_pb2 import BlockHashes, BlockSet, KVLoad, KVLoaded, KVTierBytes, KVTierKind

KINDS = {"host": KVTierKind.KV_TIER_KIND_HOST, "disk": KVTierKind.KV_TIER_KIND_DISK}
_NAMES = {kind: name for name, kind in KINDS.items()}


def keys_of(group: int, hashes: bytes) -> list[Key]:
    """Returns the keys of the blocks of one group."""
    return [(group, hashes[start : start + HASH_BYTES]) for start in range(0, len(hashes), HASH_BYTES)]


def hashes_of(keys: Iterable[Key]) -> list[BlockHashes]:
    """Returns the keys by group."""
    by_group: dict[int, list[bytes]] = {}
    for group, digest in keys:
        by_group.setdefault(group, []).append(digest)
    return [BlockHashes(group=group, hashes=b"".join(some)) for group, some in by_group.items()]


def blocks_of(sets: Iterable[BlockSet], num_blocks: Sequence[int]) -> list[tuple[Key, int]]:
    """Returns the (key, block id)s. num_blocks: of each group. Raises InvalidStep for a block that does not exist."""
    found: list[tuple[Key, int]] = []
    for blocks in sets:
        if not 0 <= blocks.group < len(num_blocks) or len(blocks.hashes) != HASH_BYTES * len(blocks.ids):
            raise InvalidStep(
                f"{len(blocks.ids)} blocks of group {blocks.group} have {len(blocks.hashes)} bytes of hashes"
            )
        if any(not 0 <= block < num_blocks[blocks.group] for block in blocks.ids):
            raise InvalidStep(f"a block of group {blocks.group} is outside of its {num_blocks[blocks.group]}")
        found += zip(keys_of(blocks.group, blocks.hashes), blocks.ids, strict=True)
    return found


def sets_of(blocks: Sequence[tuple[Key, int]]) -> list[BlockSet]:
    """Returns the (key, block id)s, in their order."""
    return [
        BlockSet(group=group, ids=[block for _, block in some], hashes=b"".join(digest for (_, digest), _ in some))
        for group, some in ((group, list(part)) for group, part in groupby(blocks, key=lambda one: one[0][0]))
    ]


def with_moves(step: Step, saves: Sequence[tuple[Key, int]], loads: Sequence[Load]) -> TieredStep:
    """Returns the step, which also saves and loads blocks."""
    fields = {name: getattr(step, name) for name in step.__dataclass_fields__}
    return TieredStep(**fields, saves=saves, loads=loads)


def loads_of(step: TieredStep) -> list[KVLoad]:
    """Returns the loads of a step."""
    return [KVLoad(load_id=one.load_id, blocks=sets_of(one.blocks), source=one.source) for one in step.loads]


def loaded_to_proto(loaded: Loaded) -> KVLoaded:
    return KVLoaded(
        load_id=loaded.load_id,
        missing=loaded.missing,
        seconds=loaded.seconds,
        bytes=[KVTierBytes(kind=KINDS[name], bytes=size) for name, size in loaded.num_bytes.items()],
    )


def loaded_from_proto(message: KVLoaded) -> Loaded:
    num_bytes = {_NAMES[one.kind]: one.bytes for one in message.bytes}
    return Loaded(message.load_id, list(message.missing), message.seconds, num_bytes)
