"""Changes of prefix caches as messages."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from pagewire.services.scheduler.kv_events.recorder import Change, Cleared, Recorder, Removed, Stored, StoredBlock
from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.v1.admin_pb2 import (
    KvBlocksCleared,
    KvBlocksRemoved,
    KvBlocksStored,
    KvEvent,
    SubscribeKvEventsResponse,
)

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
    """Returns the events of changes; one for blocks that follow each other, or are removed together."""
    events: list[KvEvent] = []
    stored: list[StoredBlock] = []
    removed: list[bytes] = []
    group = 0

    def end_run() -> None:
        if stored:
            events.append(KvEvent(stored=_stored(group, stored, kv, name_of)))
        elif removed:
            events.append(KvEvent(removed=KvBlocksRemoved(hashes=removed, group=group)))
        stored.clear()
        removed.clear()

    for change in changes:
        if isinstance(change, Stored):
            if removed or (stored and (change.group != group or not _follows(change.block, stored[-1]))):
                end_run()
            group = change.group
            stored.append(change.block)
        elif isinstance(change, Removed):
            if stored or change.group != group:
                end_run()
            group = change.group
            removed.append(change.block_hash)
        else:
            end_run()
            events.append(KvEvent(cleared=KvBlocksCleared()))
    end_run()
    return events


def _follows(block: StoredBlock, last: StoredBlock) -> bool:
    if block.origin != last.origin or bool(block.token_ids) != bool(last.token_ids):
        return False
    return not block.token_ids or block.parent == last.block_hash


def _stored(number: int, blocks: Sequence[StoredBlock], kv: KVCacheManager, name_of: NameOf) -> KvBlocksStored:
    """Returns the event of blocks of one group that follow each other."""
    group, (namespace, adapter_digest) = kv.groups[number], blocks[0].origin
    return KvBlocksStored(
        hashes=[block.block_hash for block in blocks],
        parent_hash=blocks[0].parent,
        token_ids=list(chain.from_iterable(block.token_ids for block in blocks)),
        block_size=group.block_size,
        group=number,
        adapter_digest=adapter_digest,
        adapter_name=name_of(adapter_digest) if adapter_digest else "",
        namespace=namespace,
        extra_keys=[block.extra_keys for block in blocks] if any(block.extra_keys for block in blocks) else (),
        window=0 if group.is_state else group.window,
        is_state=group.is_state,
    )
