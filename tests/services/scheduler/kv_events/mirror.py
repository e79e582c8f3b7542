"""A subscriber's copy of the prefix caches, made from messages alone, as a router keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pagewire.v1.admin_pb2 import KvBlocksStored, KvEventsPosition, SubscribeKvEventsResponse


class Held(NamedTuple):
    """The facts about a block."""

    parent: bytes
    token_ids: tuple[int, ...]
    extra_keys: bytes
    namespace: bytes


Groups = dict[int, dict[bytes, Held]]


@dataclass
class Mirror:
    """The findable blocks, by name and incarnation of the executor, and by group and hash."""

    found: dict[tuple[str, int], Groups] = field(default_factory=dict)
    position: KvEventsPosition = field(default_factory=KvEventsPosition)
    parts_left: int = 0

    def take(self, message: SubscribeKvEventsResponse) -> None:
        if message.snapshot_parts_left:
            if not self.parts_left:
                self.found.clear()
            else:
                assert message.snapshot_parts_left == self.parts_left
        else:
            assert (message.source, message.number) == (self.position.source, self.position.number + 1), "a gap"
        self.parts_left = max(0, message.snapshot_parts_left - 1)
        self.position = KvEventsPosition(source=message.source, number=message.number)
        if not message.HasField("executor"):
            return
        groups = self.found.setdefault((message.executor.name, message.executor.incarnation), {})
        for event in message.events:
            match event.WhichOneof("event"):
                case "stored":
                    self.store(groups.setdefault(event.stored.group, {}), event.stored)
                case "removed":
                    for block_hash in event.removed.hashes:
                        del groups[event.removed.group][block_hash]
                case "cleared":
                    groups.clear()

    def store(self, found: dict[bytes, Held], stored: KvBlocksStored) -> None:
        parent, size = stored.parent_hash, stored.block_size
        assert len(stored.token_ids) in (0, len(stored.hashes) * size)
        assert len(stored.extra_keys) in (0, len(stored.hashes))
        for i, block_hash in enumerate(stored.hashes):
            assert block_hash not in found, "stored twice"
            keys = stored.extra_keys[i] if stored.extra_keys else b""
            found[block_hash] = Held(parent, tuple(stored.token_ids[i * size :][:size]), keys, stored.namespace)
            parent = block_hash

    def hashes(self) -> Mapping[str, Mapping[int, set[bytes]]]:
        """Returns what can be found, by the name of the executor and by group, without those that hold nothing."""
        return {
            name: held
            for (name, _), groups in self.found.items()
            if (held := {group: set(found) for group, found in groups.items() if found})
        }
