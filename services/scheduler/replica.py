"""One executor group, as the scheduler sees it: its KV blocks, its limits, who runs on it, its steps in flight.

All of it is lost with the executor and starts over with the next one. Pure: no I/O.

Feature code does not belong here: memory is `kv_cache.py`'s, order is `policy.py`'s, what fits into a step is
`limits.py`'s, who may not share one is `suspicion.py`'s, when to decide one is `pacing.py`'s, the end of a request is
`request.py`'s.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.executor_info import ExecutorInfo
from pagewire.services.scheduler.group_blocks import GroupBlocks
from pagewire.services.scheduler.kv_cache import ComputedBlocks, KVCacheManager, NewBlocks
from pagewire.services.scheduler.limits import StepLimits
from pagewire.services.scheduler.outcome import Outputs, outcome
from pagewire.services.scheduler.pacing import Pacer
from pagewire.services.scheduler.policy import WaitingQueue, by_order, has_priority, num_victims
from pagewire.services.scheduler.request import FinishReason, Request, RequestStatus
from pagewire.services.scheduler.step import InvalidResult, NewRequest, ScheduledStep, StepResult
from pagewire.services.scheduler.suspicion import Quarantine, charge, is_suspect

# Whether the replica that asks takes a waiting request whose turn it is.
Takes = Callable[[Request], bool]


class Replica:
    """Decides its steps. An executor is attached when it is known, detached when it is lost; in between nobody runs."""

    def __init__(self, replica_id: int, config: SchedulerConfig) -> None:
        self.replica_id = replica_id
        self.pacer = Pacer(config.pipeline_depth)
        self._config = config
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up in the prefix cache
        self.num_prefix_hits = 0  # tokens found
        self._start_over(None)

    def _start_over(self, info: ExecutorInfo | None) -> None:
        self._info = info
        self._limits = StepLimits(self._config, info)
        self._kv: KVCacheManager | None = None
        if info is not None:
            prefix_caching = self._config.enable_prefix_caching and not info.whole_prompts
            max_tokens = self._limits.max_num_batched_tokens
            self._kv = KVCacheManager(info.kv_groups, info.block_size, prefix_caching, max_tokens)
        self._running: list[Request] = []  # in the policy's order: the tail is preempted first
        self._quarantine = Quarantine()
        self._in_flight: deque[ScheduledStep] = deque()
        self._finished_request_ids: list[int] = []  # rows the executor must free before the next step
        self._last_step_id = 0
        self.pacer.start_over()

    # -- executor ----------------------------------------------------------------------------------------------------

    def attach(self, info: ExecutorInfo) -> None:
        """Starts over on an executor with empty rows and an empty KV cache."""
        self._start_over(info)

    def detach(self) -> tuple[list[Request], list[Request]]:
        """The executor is gone: drops its steps and KV.

        Returns:
            Requests that go on elsewhere with their tokens, in order; and those that ended, because every executor is
            lost that runs them.
        """
        running, condemned = self._running, charge(self._running, self._in_flight)
        self._start_over(None)
        for request in running:
            request.forget_blocks()
            if request in condemned:
                request.finish(FinishReason.ERROR)
            else:
                request.preempt()
        return [request for request in running if not request.is_finished], condemned

    # -- requests ----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises InvalidRequest if no step here can ever take the request; without an executor none is refused."""
        if self._info is not None:
            self._limits.check(request)

    def has_room_for(self, request: Request) -> bool:
        """Whether the request could be admitted to a step that is decided now: there is a row, there are blocks, and
        those that run leave some of the token budget."""
        if self._info is None or not self.num_open_rows or not self._quarantine.admits(request, not self._running):
            return False
        computed = self._find_room(request)
        if computed is None:
            return False
        outstanding = sum(max(1, running.num_tokens - running.num_computed_tokens) for running in self._running)
        budget = self._limits.max_num_batched_tokens - outstanding
        return budget > 0 and self._limits.chunk(request.num_tokens - computed.num_tokens, budget, False) > 0

    def abort(self, request: Request) -> None:
        """Takes a running request out at any moment; its blocks are free at once, its row with the next step."""
        self._running.remove(request)
        self._release(request)

    # -- steps -------------------------------------------------------------------------------------------------------

    def schedule(self, waiting: WaitingQueue, takes: Takes) -> ScheduledStep | None:
        """Decides the next step, or None if nobody can run now. `can_schedule` must be true."""
        assert self._kv is not None
        step = ScheduledStep(self._last_step_id + 1)
        self._kv.start_step(self._running)
        self._make_room_for_higher_priority(self._kv, waiting, takes)
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(self._kv, step, waiting, takes)
        if self.num_preemptions == num_preemptions:
            self._schedule_waiting(self._kv, step, waiting, takes, budget)
        # An idle executor hears of its free rows at once, a busy one with its next step.
        if not step.request_ids and (self._in_flight or not self._finished_request_ids):
            return None
        step.finished_request_ids, self._finished_request_ids = self._finished_request_ids, []
        self._last_step_id = step.step_id
        self._in_flight.append(step)
        return step

    def update(self, result: StepResult) -> Outputs:
        """Takes in what the oldest step in flight brought. Tokens of requests that ended or were preempted meanwhile
        are dropped. A request that ended has its finish_reason set.

        Raises:
            InvalidResult: the result is not that step's.
        """
        if not self._in_flight:
            raise InvalidResult(f"the executor answered step {result.step_id}, but no step is in flight")
        step = self._in_flight[0]
        step.check(result)  # before it is let go: who is in it is charged if the executor is given up
        self._in_flight.popleft()
        refused = self._end_refused(step, result) if step.num_image_bytes or result.errors else []
        outputs = outcome(step, result)
        outputs.refused = refused
        for request, reason in outputs.ends:
            self._release(request)
            request.finish(reason)
        if outputs.ends or refused:
            self._running = [request for request in self._running if not request.is_finished]
        return outputs

    def _end_refused(self, step: ScheduledStep, result: StepResult) -> list[tuple[Request, Any]]:
        """Ends those with whom the executor cannot go on; blocks of others who entered may be found from now on."""
        for request in step.admitted:
            request.is_accepted = request.is_accepted or request.request_id not in result.errors
        refused = [request for request in self._running if request.request_id in result.errors]
        for request in refused:
            self._release(request)
            request.finish(FinishReason.ERROR)
        return [(request, result.errors[request.request_id]) for request in refused]

    # -- what is going on --------------------------------------------------------------------------------------------

    @property
    def info(self) -> ExecutorInfo | None:
        """Of the executor that is attached."""
        return self._info

    @property
    def running(self) -> list[Request]:
        """In the policy's order; not to be changed."""
        return self._running

    @property
    def max_num_seqs(self) -> int:
        return self._limits.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        return self._limits.max_num_batched_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_open_rows(self) -> int:
        return self._limits.max_num_seqs - len(self._running)

    @property
    def can_schedule(self) -> bool:
        """Whether there is an executor, with fewer than pipeline_depth steps in flight."""
        return self._kv is not None and len(self._in_flight) < self._config.pipeline_depth

    @property
    def num_blocks(self) -> int:
        return self._kv.num_blocks if self._kv else 0

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free_blocks if self._kv else 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that is in use, 0 to 1."""
        return self._kv.usage if self._kv else 0.0

    @property
    def kv_groups(self) -> Sequence[GroupBlocks]:
        """The blocks of each group of layers, to look at; none without an executor."""
        return self._kv.groups if self._kv else ()

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, rows and running requests agree."""
        if self._kv is not None:
            self._kv.check_integrity(self._running)
        orders = [request.order for request in self._running]
        assert orders == sorted(orders), "running is out of order"
        assert self.num_open_rows >= 0, "more requests than rows"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING and request.replica_id == self.replica_id

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _schedule_running(self, kv: KVCacheManager, step: ScheduledStep, waiting: WaitingQueue, takes: Takes) -> int:
        """Schedules who runs already, decodes first, and preempts from the tail when blocks run out.

        Returns:
            What is left of the token budget; nothing, if a prefill waits for blocks: they are not to go to newcomers.
        """
        budget = self._limits.max_num_batched_tokens
        # The loop may pop from the tail while it goes: those are requests it has not reached yet, or the present one.
        runners = self._quarantine.runners(self._running, self._is_suspect_due(waiting, takes))
        draft_budget = self._limits.draft_budget(len(runners))
        prefills: list[Request] = []
        for request in runners:
            num_tokens = len(request.token_ids) + request.num_output_placeholders
            if num_tokens - request.num_computed_tokens > 1:
                prefills.append(request)
                continue
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is in flight
            if draft_budget and (num_drafts := self._draft(kv, step, request, draft_budget)):
                draft_budget -= num_drafts
                budget -= 1 + num_drafts
                continue
            # Most have room for a token, and need no call to know.
            has_room = request.num_computed_tokens < request.num_slots
            new_blocks = kv.no_blocks if has_room else kv.allocate_slots(request, 1)
            while new_blocks is None and request.status is RequestStatus.RUNNING:
                self._preempt_tail(waiting)
                new_blocks = kv.allocate_slots(request, 1) if request.status is RequestStatus.RUNNING else None
            if new_blocks is not None:
                self._run(kv, step, request, 1, new_blocks)
                budget -= 1
        for request in prefills:
            if request.status is not RequestStatus.RUNNING:
                break  # preempted, like those behind it, for one before it
            if (num_wanted := self._chunk(request, budget, request.num_computed_tokens, waiting)) > 0:
                num_new_tokens = self._fitting(kv, step, request, num_wanted, waiting)
                if num_new_tokens == 0:
                    return 0
                self._run_prompt(kv, step, request, num_new_tokens)
                budget -= num_new_tokens
        return budget

    def _fitting(
        self, kv: KVCacheManager, step: ScheduledStep, request: Request, num_tokens: int, waiting: WaitingQueue
    ) -> int:
        """How many of num_tokens tokens of a running prefill have blocks. A group with a window has those of the next
        chunk only: 0, if others hold too many. If nobody runs who would give some back, the tail is preempted."""
        num_fitting = kv.num_allocatable_tokens(request, num_tokens)
        while num_fitting == 0 and not step.request_ids and not self._in_flight:
            self._preempt_tail(waiting)
            if request.status is not RequestStatus.RUNNING:
                return 0
            num_fitting = kv.num_allocatable_tokens(request, num_tokens)
        return num_fitting

    def _schedule_waiting(
        self, kv: KVCacheManager, step: ScheduledStep, waiting: WaitingQueue, takes: Takes, budget: int
    ) -> None:
        """Admits waiting requests in order until one does not fit. Who waits for another's blocks is passed over, but
        keeps a row free."""
        place = 0
        while place < min(len(waiting), self.num_open_rows) and budget > 0 and step.takes_more:
            request = waiting[place]
            if kv.keeps_waiting(request):
                place += 1
                continue
            is_alone = not (step.request_ids or self._in_flight)
            if not self._quarantine.admits(request, is_alone):
                return
            computed = self._find_room(request)
            if computed is None or not takes(request):
                return
            # A suspect, for which the others pause, would wait for them.
            if not is_suspect(request) and kv.awaits(request, computed):
                place += 1
                continue
            num_new_tokens = self._chunk(request, budget, computed.num_tokens, waiting)
            if num_new_tokens == 0:
                return
            waiting.pop(place)
            self._enter(request, computed)
            kv.admit(request, computed)
            step.admitted.append(request)
            step.num_image_bytes += request.images.num_bytes
            step.new_requests.append(NewRequest.of(request))
            self._run_prompt(kv, step, request, num_new_tokens)
            budget -= num_new_tokens

    def _enter(self, request: Request, computed: ComputedBlocks) -> None:
        """A waiting request takes a row."""
        request.status = RequestStatus.RUNNING
        request.replica_id = self.replica_id
        request.awaited = None
        request.is_accepted = not request.images.images
        request.num_computed_tokens = computed.num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(computed.num_tokens, request.num_prompt_tokens)
            self.num_prefix_queries += request.num_tokens
            self.num_prefix_hits += computed.num_tokens
        insort(self._running, request, key=by_order)
        self._quarantine.enter(request)

    def _find_room(self, request: Request) -> ComputedBlocks | None:
        assert self._kv is not None
        return self._kv.find_room(request, others_run=bool(self._running))

    def _is_suspect_due(self, waiting: WaitingQueue, takes: Takes) -> bool:
        """Whether a suspect is first in line, and enters here as soon as it is alone."""
        if not waiting or not is_suspect(waiting.peek()) or self._quarantine.is_closed:
            return False
        request = waiting.peek()
        return self.num_open_rows > 0 and self._find_room(request) is not None and takes(request)

    def _chunk(self, request: Request, budget: int, num_computed_tokens: int, waiting: WaitingQueue) -> int:
        is_alone = len(self._running) + len(waiting) == 1
        return self._limits.chunk(len(request.token_ids) - num_computed_tokens, budget, is_alone)

    def _draft(self, kv: KVCacheManager, step: ScheduledStep, request: Request, budget: int) -> int:
        """Lets a request that needs one token run that and drafts behind it, as many as the budget and the free blocks
        allow; returns how many. 0: nothing was done, as there can be none."""
        max_gain = request.max_num_tokens - len(request.token_ids) - request.num_output_placeholders
        num_drafts = self._limits.num_drafts(budget, max_gain)
        # Nobody is to lose blocks to a draft. What a matcher allows behind one is not known.
        if num_drafts <= 0 or request.has_matcher or not kv.has_free_blocks(len(self._running) + num_drafts):
            return 0
        new_blocks = kv.allocate_slots(request, 1 + num_drafts)
        assert new_blocks is not None
        step.drafts_of[len(step.sampled)] = num_drafts
        self._run(kv, step, request, 1, new_blocks)
        step.num_scheduled_tokens[-1] += num_drafts
        request.num_computed_tokens += num_drafts
        request.num_output_placeholders += num_drafts
        return num_drafts

    def _run(
        self, kv: KVCacheManager, step: ScheduledStep, request: Request, num_tokens: int, new_blocks: NewBlocks
    ) -> None:
        """Puts a request into the step and advances its state as if the step were done."""
        step.request_ids.append(request.request_id)
        step.num_scheduled_tokens.append(num_tokens)
        step.num_new_blocks.extend(new_blocks.counts)
        if new_blocks.ids:
            step.new_block_ids += new_blocks.ids
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
            request.num_output_placeholders += 1
            step.sampled.append(request)
            step.epochs.append(request.epoch)
        if request.num_computed_tokens >= request.num_tokens_to_cache:
            kv.cache_blocks(request)

    def _run_prompt(self, kv: KVCacheManager, step: ScheduledStep, request: Request, num_tokens: int) -> None:
        """As `_run`, for a request that may end with this step without a token, as it yields a vector. There are
        blocks for its tokens."""
        new_blocks = kv.allocate_slots(request, num_tokens)
        assert new_blocks is not None
        self._run(kv, step, request, num_tokens, new_blocks)
        if request.yields_vector and step.sampled and step.sampled[-1] is request:
            step.yielding.append((step.sampled.pop(), step.epochs.pop()))

    def _make_room_for_higher_priority(self, kv: KVCacheManager, waiting: WaitingQueue, takes: Takes) -> None:
        """Preempts running requests of lower priority for the first waiting one, if it lacks a row or blocks and they
        suffice. Never happens under fcfs, where those that run came first."""
        if not waiting or not self._running or not has_priority(waiting.peek(), self._running[-1]):
            return
        request = waiting.peek()
        if (
            not self._quarantine.is_closed
            and takes(request)
            and not kv.awaits(request, kv.get_computed_blocks(request))
        ):
            for _ in range(num_victims(request, self._running, self.num_open_rows, kv)):
                self._preempt_tail(waiting)

    def _preempt_tail(self, waiting: WaitingQueue) -> None:
        """Takes blocks and row from the last of running; its tokens are computed again later."""
        request = self._running.pop()
        self._release(request)
        request.preempt()
        waiting.push(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        assert self._kv is not None
        self._kv.free(request)
        self._finished_request_ids.append(request.request_id)
