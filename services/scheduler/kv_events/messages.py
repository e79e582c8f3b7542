"""Changes of prefix caches as messages."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from pagewire.services.scheduler.kv_events.recorder import Change, Cleared, Recorder, Removed, Stored
from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.v1.admin_pb2 import KvBlocksCleared, KvBlocksStored, KvEvent, SubscribeKvEventsResponse

# Returns the name of an adapter by its digest; "": it has none.
NameOf = Callable[[str], str]
_BLOCKS_IN_PART = 1000


def message_of(recorder: Recorder, changes: Iterable[Change], name_of: NameOf) -> SubscribeKvEventsResponse:
    """Returns the message of changes on one executor, without its number."""
    events = _events(changes, recorder.kv, name_of)
    return SubscribeKvEventsResponse(time=time.time(), executor=recorder.executor, events=events)


def snapshot(recorders: Iterable[Recorder], name_of: NameOf) -> Iterator[SubscribeKvEventsResponse]:
    """Returns the messages of all findable blocks, without their number. They are those of now, whenever the messages
    are taken."""
    copies = [
        (recorder, [Stored(group, block) for group, found in enumerate(recorder.found) for block in found.values()])
        for recorder in recorders
    ]
    # Each executor has at least one part.
    num_parts = sum(max(1, -(-len(stored) // _BLOCKS_IN_PART)) for _, stored in copies)

    def parts() -> Iterator[SubscribeKvEventsResponse]:
        if not copies:
            yield SubscribeKvEventsResponse(time=time.time(), snapshot_parts_left=1)
        left = num_parts
        for recorder, stored in copies:
            changes = iter(stored)
            part: list[Change] = [Cleared(), *islice(changes, _BLOCKS_IN_PART)]
            while part:
                message = message_of(recorder, part, name_of)
                message.snapshot_parts_left, left = left, left - 1
                yield message
                part = list(islice(changes, _BLOCKS_IN_PART))

    return parts()


def _events(changes: Iterable[Change], kv: KVCacheManager, name_of: NameOf) -> Sequence[KvEvent]:
    """Returns the events of changes; one for blocks that follow each other."""
    events: list[KvEvent] = []
    last: Change = Cleared()
    for change in changes:
        if isinstance(change, Stored):
            if not _follows(change, last):
                events.append(KvEvent(stored=_start(change, kv, name_of)))
            _append(events[-1].stored, change)
        elif isinstance(change, Removed):
            if not (isinstance(last, Removed) and last.group == change.group):
                events.append(KvEvent())
                events[-1].removed.group = change.group
            events[-1].removed.hashes.append(change.block_hash)
        else:
            events.append(KvEvent(cleared=KvBlocksCleared()))
        last = change
    return events


def _follows(change: Stored, last: Change) -> bool:
    if not isinstance(last, Stored) or last.group != change.group or last.block.origin != change.block.origin:
        return False
    is_known = bool(change.block.token_ids)
    return is_known == bool(last.block.token_ids) and (not is_known or last.block.block_hash == change.block.parent)


def _start(change: Stored, kv: KVCacheManager, name_of: NameOf) -> KvBlocksStored:
    """Returns the event that begins with a block, before it is appended."""
    group, (namespace, adapter_digest) = kv.groups[change.group], change.block.origin
    return KvBlocksStored(
        parent_hash=change.block.parent,
        block_size=group.block_size,
        group=change.group,
        adapter_digest=adapter_digest,
        adapter_name=name_of(adapter_digest) if adapter_digest else "",
        namespace=namespace,
        window=0 if group.is_state else group.window,
        is_state=group.is_state,
    )


def _append(stored: KvBlocksStored, change: Stored) -> None:
    block = change.block
    if block.extra_keys or stored.extra_keys:
        stored.extra_keys.extend([b""] * (len(stored.hashes) - len(stored.extra_keys)))
        stored.extra_keys.append(block.extra_keys)
    stored.hashes.append(block.block_hash)
    stored.token_ids.extend(block.token_ids)
