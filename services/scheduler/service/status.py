"""The status of the scheduler and its replicas, computed when it is requested."""

from itertools import groupby

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.memory.group_blocks import GroupBlocks
from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.service.engine import Engine
from pagewire.v1.admin_pb2 import KVGroupStatus, KVRun, ReplicaStatus, SchedulerStatus, ServiceStatus

# The most cells of a map, which fits on a screen and takes less than a millisecond of the event loop. With more blocks,
# a map shows every second, third, ... block.
MAX_CELLS = 4096


def describe(engine: Engine, status: ServiceStatus, with_kv_maps: bool) -> None:
    """Fills in the scheduler's part of a status."""
    scheduler = engine.scheduler
    num_preemptions, num_prefix_queries, num_prefix_hits, _ = engine.stats.totals()
    status.scheduler.CopyFrom(
        SchedulerStatus(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            generation_tokens_per_second=stats.GENERATION_RATE.per_second,
            prompt_tokens_per_second=stats.PROMPT_RATE.per_second,
            num_generation_tokens=stats.GENERATION_RATE.total,
            num_prompt_tokens=stats.PROMPT_RATE.total,
            num_prefix_queries=num_prefix_queries,
            num_prefix_hits=num_prefix_hits,
            num_preemptions=num_preemptions,
            replicas=[
                _replica(driver.replica, driver.address, with_kv_maps) for driver in engine.executors.drivers.values()
            ],
            sleep=engine.sleep.status,
        )
    )


def _replica(replica: Replica, address: str, with_kv_maps: bool) -> ReplicaStatus:
    status = ReplicaStatus(
        address=address,
        is_attached=replica.info is not None,
        name=replica.name,
        is_leaving=replica.is_leaving,
        num_prefix_queries=replica.counts.num_prefix_queries,
        num_prefix_hits=replica.counts.num_prefix_hits,
        num_generation_tokens=replica.counts.num_generation_tokens,
    )
    if replica.info is not None:
        status.num_running = replica.num_running
        status.max_num_seqs = replica.limits.max_num_seqs
        status.weights_version = replica.info.weights.version
        status.role = replica.info.role
        status.is_replacing_weights = replica.is_draining
        status.kv_groups.extend(_group(group, with_kv_maps) for group in replica.kv.groups)
    return status


def _group(group: GroupBlocks, with_map: bool) -> KVGroupStatus:
    pool = group.pool
    status = KVGroupStatus(
        num_blocks=pool.num_blocks,
        block_size=group.block_size,
        num_free=pool.num_free_blocks - pool.num_cached_blocks,
        num_cached=pool.num_cached_blocks,
        num_used=pool.num_blocks - pool.num_free_blocks,
        num_shared=pool.num_shared_blocks,
        window=0 if group.is_state else group.window,
        is_state=group.is_state,
    )
    if with_map:
        status.blocks_per_cell = -(-pool.num_blocks // MAX_CELLS)
        runs = groupby(pool.states(status.blocks_per_cell))
        status.map.extend(KVRun(state=int(state), num_cells=len(list(cells))) for state, cells in runs)  # type: ignore[arg-type]
    return status
