"""Checks of the scheduler's state, for tests and simulations: blocks, rows, queues and placement agree."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.memory.block_pool import BlockPool
from pagewire.services.scheduler.memory.group_blocks import GroupBlocks
from pagewire.services.scheduler.placement.fleet import Fleet
from pagewire.services.scheduler.values.blocks import Block
from pagewire.services.scheduler.values.request import RequestStatus


def check_integrity(scheduler: Scheduler) -> None:
    """Raises AssertionError unless blocks, rows and queues agree."""
    for replica in scheduler.replicas:
        _check_replica(replica)
    assert isinstance(scheduler.placement, Fleet)
    scheduler.placement.check_integrity()
    for request in scheduler.waiting:
        assert not request.blocks.held, "a waiting request holds blocks"
        assert request.replica_id is None, "a waiting request runs"


def _check_replica(replica: Replica) -> None:
    running, kv = list(replica.running), replica.kv
    for index, group in enumerate(kv.groups):
        held = chain.from_iterable(request.blocks.held[index].blocks for request in running)
        _check_group(group, chain(held, () if kv.tiers is None else kv.tiers.held(index)))
    if kv.indexed is not None:
        kv.indexed.check_integrity(running)
    orders = [request.order for request in running]
    assert orders == sorted(orders), "running is out of order"
    assert replica.num_open_rows >= 0, "more requests than rows"
    for request in running:
        assert request.status is RequestStatus.RUNNING and request.replica_id == replica.replica_id


def _check_group(group: GroupBlocks, held: Iterable[Block]) -> None:
    """Raises AssertionError unless the pool is consistent and exactly these blocks are held."""
    check_pool(group.pool)
    counts = Counter(held)
    assert len(counts) == group.pool.num_blocks - group.pool.num_free_blocks, "a block is held by no request or load"
    assert all(block.ref_count == count for block, count in counts.items()), "a ref_count is wrong"


def check_pool(pool: BlockPool) -> None:
    """Raises AssertionError unless free + used = total and the hash index matches the blocks."""
    free, blocks, by_hash = list(pool._free), pool._blocks, pool._by_hash
    assert len(free) == len(pool._free) == len(set(free)), "the free queue is broken"
    assert all(block.ref_count == 0 for block in free), "a held block is in the free queue"
    num_used = sum(block.ref_count > 0 for block in blocks)
    assert len(free) + num_used == len(blocks), f"{len(free)} free + {num_used} used is not all"
    assert all(block.ref_count >= 0 for block in blocks), "a block was released too often"
    for block_hash, block in by_hash.items():
        assert block.block_hash == block_hash, "the hash index names a block with other contents"
    num_cached = sum(block.block_hash is not None for block in free)
    assert pool.num_cached_blocks == num_cached, f"{pool.num_cached_blocks} blocks are not the {num_cached} cached"
    num_shared = sum(block.ref_count > 1 for block in blocks)
    assert pool.num_shared_blocks == num_shared, f"{pool.num_shared_blocks} blocks are not the {num_shared} shared"
    num_hashed = sum(block.block_hash is not None for block in blocks)
    assert num_hashed == len(by_hash), "a hashed block is missing in the index"
