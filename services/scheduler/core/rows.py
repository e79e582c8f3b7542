"""The running requests of one executor, and the rows and KV blocks that they hold. All are lost with the executor."""

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.core.cohorts import Cohorts
from pagewire.services.scheduler.core.limits import StepLimits
from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.policy import by_order
from pagewire.services.scheduler.core.seams import Features
from pagewire.services.scheduler.core.waiting import WaitingQueue
from pagewire.services.scheduler.costs.cost_model import StepCosts
from pagewire.services.scheduler.costs.prefill_budget import Allowance
from pagewire.services.scheduler.memory.block_index import BlockIndex
from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.values.blocks import ComputedBlocks
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.request import FinishReason, Request, RequestStatus
from pagewire.services.scheduler.values.step import ScheduledStep

_INTERNAL = 13  # as gRPC numbers its codes


@dataclass(slots=True)
class Counts:
    """Totals of a replica, over all its executors."""

    num_preemptions: int = 0
    num_prefix_queries: int = 0  # tokens looked up in the prefix cache
    num_prefix_hits: int = 0  # tokens found there
    num_generation_tokens: int = 0


class Rows:
    """The running requests of a replica, in the policy's order, on one executor or on none."""

    def __init__(
        self,
        replica_id: int,
        config: SchedulerConfig,
        info: ExecutorInfo | None,
        features: Features,
        counts: Counts,
        index: BlockIndex | None,
    ) -> None:
        """info: None without an executor. counts: the totals to add to. index: is kept up to date with the blocks of
        this executor."""
        self._replica_id = replica_id
        self._shares = features.shares
        self.counts = counts  # of the replica
        self.limits = StepLimits(config, info)
        self.weights_version = "" if info is None else info.weights.version
        self.is_draining = False  # only requests that need these weights enter
        self.kv = KVCacheManager((), 1, False, 0)
        if info is not None:
            prefix_caching = config.enable_prefix_caching and not info.whole_prompts
            max_tokens, version = self.limits.max_num_batched_tokens, self.weights_version
            self.kv = KVCacheManager(info.kv_groups, info.block_size, prefix_caching, max_tokens, version, index)
        features.on_memory(replica_id, info, self.kv)
        self.running: list[Request] = []
        self.version = 0  # changes when requests begin or end, and with each step: marks derived values as stale
        self.quarantine = features.suspects.quarantine()
        self.num_stages = 1 if info is None else info.pipeline_stages
        self.cohorts = Cohorts(self.num_stages)
        self.costs = StepCosts(self.num_stages)
        self.drafts = features.drafts(info)
        self.slots = features.slots(info)
        self.allowance = Allowance()
        self.lacks_blocks = False  # a running prompt waits for blocks
        self._finished_request_ids: list[int] = []  # rows that the executor must free before the next step

    @property
    def num_open(self) -> int:
        return self.limits.max_num_seqs - len(self.running)

    @property
    def has_unreported(self) -> bool:
        """True if the executor has yet to free rows of requests that ended, or to begin a load."""
        return bool(self._finished_request_ids) or (self.kv.tiers is not None and self.kv.tiers.has_loads)

    def leave(self) -> None:
        """Drops all running requests, as the executor is lost."""
        self.kv.leave_index(self.running)
        for request in self.running:
            self._shares.count(request.account, running=-1)

    # -- admission ---------------------------------------------------------------------------------------------------

    def suits(self, request: Request) -> bool:
        """Returns whether this executor's weights may compute a waiting request, with its adapter if it has one."""
        return self.has_weights_for(request) and self.slots.take(request)

    def has_weights_for(self, request: Request) -> bool:
        if request.weights_version and request.num_output_tokens:
            return request.weights_version == self.weights_version
        return not self.is_draining

    def find_room(self, request: Request) -> ComputedBlocks | None:
        return self.kv.find_room(request, others_run=bool(self.running))

    def has_room_for(self, request: Request) -> bool:
        """Returns whether the request could be admitted to a step that is decided now: a row is open, there are blocks,
        and running requests leave some of the token budget."""
        if not self.suits(request) or not self.num_open or not self.quarantine.admits(request, not self.running):
            return False
        computed = self.find_room(request)
        if computed is None:
            return False
        outstanding = sum(max(1, running.num_tokens - running.num_computed_tokens) for running in self.running)
        budget = self.limits.max_num_batched_tokens - outstanding
        return budget > 0 and self.limits.chunk(request.num_tokens - computed.num_tokens, budget, False) > 0

    def enter(self, request: Request, computed: ComputedBlocks) -> None:
        """Gives a waiting request a row and the blocks of its prompt."""
        request.status = RequestStatus.RUNNING
        request.replica_id = self._replica_id
        request.weights_version = self.weights_version
        request.adapter_slot = self.slots.enter(request)
        request.is_accepted = not request.images.images
        request.num_computed_tokens = computed.num_tokens
        self._shares.count(request.account, running=1)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(computed.num_tokens, request.num_prompt_tokens)
            self.counts.num_prefix_queries += request.num_tokens
            self.counts.num_prefix_hits += computed.num_tokens
        insort(self.running, request, key=by_order)
        self.version += 1
        self.quarantine.enter(request)
        self.kv.admit(request, computed)

    # -- steps -------------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        """Prepares the decision of a step."""
        self.version += 1
        self.kv.start_step(self.running)

    def end_step(self, step: ScheduledStep) -> None:
        """Adds what changed since the last step to a step that is about to be sent."""
        self.version += 1
        step.adapter_slots = self.slots.take_changes()
        step.tiers = None if self.kv.tiers is None else self.kv.tiers.take_changes()
        step.finished_request_ids, self._finished_request_ids = self._finished_request_ids, []

    def accept(self, step: ScheduledStep, errors: Mapping[int, Any]) -> list[tuple[Request, Any]]:
        """Ends the requests that the executor refused, and makes blocks of the other new requests findable.

        errors: by request id. Returns the refused requests, with their errors.
        """
        for request in step.admitted:
            request.is_accepted = request.is_accepted or request.request_id not in errors
        refused = [request for request in self.running if request.request_id in errors]
        for request in refused:
            self._release(request)
            if errors[request.request_id].code == _INTERNAL:
                self.kv.forget(request)  # NaN in one of its blocks would be NaN for any request that finds it
            request.finish(FinishReason.ERROR)
        return [(request, errors[request.request_id]) for request in refused]

    def take_in(self, outputs: Outputs) -> None:
        """Ends the requests that have their last token."""
        self.version += 1
        self.counts.num_generation_tokens += len(outputs.token_ids)
        for request, reason in outputs.ends:
            self._release(request)
            request.finish(reason)
        if outputs.ends or outputs.refused:
            self.running = [request for request in self.running if not request.is_finished]

    # -- ends --------------------------------------------------------------------------------------------------------

    def remove(self, request: Request) -> None:
        """Removes a running request: its blocks are freed at once, its row with the next step."""
        del self.running[bisect_left(self.running, request.order, key=by_order)]
        self._release(request)

    def preempt(self, request: Request, waiting: WaitingQueue) -> None:
        """Takes the blocks and the row from a running request; its tokens are computed again later."""
        self.remove(request)
        request.preempt()
        waiting.push(request)
        self.counts.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.kv.free(request)
        self.slots.leave(request)
        self.version += 1
        self._finished_request_ids.append(request.request_id)
        self._shares.count(request.account, running=-1)
