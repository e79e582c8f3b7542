"""Who runs on one executor, and what they hold: rows and KV blocks. All of it is lost with the executor."""

from bisect import bisect_left, insort

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.core.cohorts import Cohorts
from pagewire.services.scheduler.core.executor_info import ExecutorInfo
from pagewire.services.scheduler.core.fairness import Ledger
from pagewire.services.scheduler.core.limits import StepLimits
from pagewire.services.scheduler.core.policy import by_order
from pagewire.services.scheduler.core.request import Request, RequestStatus
from pagewire.services.scheduler.core.suspicion import Quarantine
from pagewire.services.scheduler.core.waiting import WaitingQueue
from pagewire.services.scheduler.costs.cost_model import StepCosts
from pagewire.services.scheduler.costs.prefill_budget import Allowance
from pagewire.services.scheduler.costs.speculation import Speculation
from pagewire.services.scheduler.memory.kv_cache import ComputedBlocks, KVCacheManager
from pagewire.services.scheduler.memory.prefix_index import IndexedBlocks
from pagewire.services.scheduler.placement.replica_load import Load


class Rows:
    """The running requests of a replica, in the policy's order."""

    def __init__(self, replica_id: int, config: SchedulerConfig, ledger: Ledger) -> None:
        self._replica_id = replica_id
        self._config = config
        self._ledger = ledger
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up in the prefix cache
        self.num_prefix_hits = 0  # tokens found
        self.num_generation_tokens = 0
        self.running: list[Request] = []
        self.kv: KVCacheManager | None = None
        self.index: IndexedBlocks | None = None  # that is to know which blocks are here
        self.start_over(None)

    def start_over(self, info: ExecutorInfo | None) -> None:
        """On an executor with empty rows and an empty KV cache; None: there is none."""
        if self.kv is not None and self.kv.indexed is not None:
            self.kv.indexed.leave(self.running)
        for request in self.running:
            self._ledger.count(request.account, running=-1)
        self.limits = StepLimits(self._config, info)
        self.weights_version = "" if info is None else info.weights.version
        self.is_draining = False  # nobody enters but who needs these weights
        self.kv = None
        self.load: Load | None = None  # until somebody begins or ends, or a step is decided
        if info is not None:
            prefix_caching = self._config.enable_prefix_caching and not info.whole_prompts
            max_tokens = self.limits.max_num_batched_tokens
            self.kv = KVCacheManager(
                *(info.kv_groups, info.block_size, prefix_caching, max_tokens, self.weights_version, self.index)
            )
        self.running = []
        self.quarantine = Quarantine()
        self.num_stages = 1 if info is None else info.pipeline_stages
        self.cohorts = Cohorts(self.num_stages)
        self.costs = StepCosts(self.num_stages)
        self.speculation = Speculation(info)
        self.allowance = Allowance()
        self.lacks_blocks = False  # a running prompt waits for some
        self.finished_request_ids: list[int] = []  # rows the executor must free before the next step

    @property
    def num_open(self) -> int:
        return self.limits.max_num_seqs - len(self.running)

    def suits(self, request: Request) -> bool:
        """Whether a waiting request may be computed here, as far as weights are concerned."""
        if request.weights_version and request.num_output_tokens:
            return request.weights_version == self.weights_version
        return not self.is_draining

    def find_room(self, request: Request) -> ComputedBlocks | None:
        assert self.kv is not None
        return self.kv.find_room(request, others_run=bool(self.running))

    def enter(self, request: Request, computed: ComputedBlocks) -> None:
        """A waiting request takes a row, and the blocks of its prompt."""
        assert self.kv is not None
        request.status = RequestStatus.RUNNING
        request.replica_id = self._replica_id
        request.weights_version = self.weights_version
        request.awaited = None
        request.is_accepted = not request.images.images
        request.num_computed_tokens = computed.num_tokens
        self._ledger.count(request.account, running=1)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(computed.num_tokens, request.num_prompt_tokens)
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += computed.num_tokens
            self._ledger.charge_prompt(request.account, request.num_tokens - computed.num_tokens)
        insort(self.running, request, key=by_order)
        self.load = None
        self.quarantine.enter(request)
        self.kv.admit(request, computed)

    def release(self, request: Request) -> None:
        """Takes everything from a running request but its place among them: blocks are free at once, its row with the
        next step."""
        assert self.kv is not None
        self.kv.free(request)
        self.load = None
        self.finished_request_ids.append(request.request_id)
        self._ledger.count(request.account, running=-1)

    def remove(self, request: Request) -> None:
        """Takes a running request out."""
        del self.running[bisect_left(self.running, request.order, key=by_order)]
        self.release(request)

    def preempt(self, request: Request, waiting: WaitingQueue) -> None:
        """Takes blocks and row from a running request; its tokens are computed again later."""
        self.remove(request)
        request.preempt()
        waiting.push(request)
        self.num_preemptions += 1
