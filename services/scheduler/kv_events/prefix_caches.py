"""The prefix caches of all replicas, as AdminService offers them to operators."""

import logging

from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.memory.reset import reset
from pagewire.v1.admin_pb2 import ResetPrefixCacheRequest, ResetPrefixCacheResponse

logger = logging.getLogger(__name__)


class PrefixCaches:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def reset(self, request: ResetPrefixCacheRequest) -> ResetPrefixCacheResponse:
        """Makes all replicas forget their findable blocks."""
        replicas = [replica for replica in self._scheduler.replicas if replica.info is not None]
        num_blocks = sum(reset(replica.kv, replica.running) for replica in replicas)
        logger.info("the prefix cache was reset: %d executors forgot %d blocks", len(replicas), num_blocks)
        return ResetPrefixCacheResponse(num_blocks=num_blocks, num_executors=len(replicas))
