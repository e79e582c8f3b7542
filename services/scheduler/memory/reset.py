"""Resets of the prefix cache."""

from collections.abc import Iterable

from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.values.request import Request


def reset(kv: KVCacheManager, running: Iterable[Request]) -> int:
    """Forgets all findable blocks of a replica, and returns their number.

    Running requests keep the blocks that they hold. None of these is found later, nor are the blocks that follow them,
    as they are computed from what came before. A request that is preempted starts anew.
    """
    num_blocks = 0
    for group in kv.groups:
        hashes = list(group.pool.hashes)
        num_blocks += len(hashes)
        for block_hash in hashes:
            group.pool.forget(block_hash)
    if kv.tiers is not None:
        kv.tiers.clear()
    if kv.indexed is not None:
        kv.indexed.forget(running)
    for request in running:
        request.blocks.hide()
    return num_blocks
