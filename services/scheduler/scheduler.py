"""The scheduling decision: a pure core without I/O.

One rule: every request has `num_computed_tokens` and `num_tokens`, and each step lets the first catch up with the
second, under a token budget: requests that need one token first, then running prefills, then waiting requests. Prefill
and decode, chunked prefill, prefix hits and resumption after preemption are all this rule.

State advances when a step is scheduled, not when its result arrives, so that the next step can be scheduled meanwhile.

Feature code does not belong here: memory is `kv_cache.py`'s, order is `policy.py`'s, what fits into a step is
`limits.py`'s, who may not share one is `suspicion.py`'s, the end of a request is `request.py`'s.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from pagewire.config import SchedulerConfig
from pagewire.sampling_params import InvalidRequest
from pagewire.services.scheduler.kv_cache import KVCacheManager
from pagewire.services.scheduler.limits import StepLimits
from pagewire.services.scheduler.policy import POLICIES, WaitingQueue, by_order, has_priority, num_victims
from pagewire.services.scheduler.request import FinishReason, Request, RequestStatus
from pagewire.services.scheduler.step import ExecutorInfo, NewRequest, Outputs, ProtocolError, Step, StepResult
from pagewire.services.scheduler.suspicion import Quarantine, charge, is_suspect


class QueueFull(Exception):
    """max_waiting_requests requests are waiting already."""


class Scheduler:
    """Decides who runs in each step on one replica.

    An executor is attached when it is known and detached when it is lost; in between nobody runs and everybody waits.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._policy = POLICIES[config.scheduling_policy]
        self._num_arrivals = 0
        self._waiting = WaitingQueue()
        self._has_leftovers = False  # the last step could not take all that waited
        self._quarantine = Quarantine()
        self._running: list[Request] = []  # in the policy's order: the tail is preempted first
        self._in_flight: deque[Step] = deque()
        self._finished_request_ids: list[int] = []  # rows the executor must free before the next step
        self._last_step_id = 0
        self._info: ExecutorInfo | None = None
        self._kv: KVCacheManager | None = None
        self._limits = StepLimits(config, None)
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up in the prefix cache
        self.num_prefix_hits = 0  # tokens found

    # -- executor ----------------------------------------------------------------------------------------------------

    def attach(self, info: ExecutorInfo) -> list[tuple[Request, InvalidRequest | None]]:
        """Starts over on an executor with empty rows and an empty KV cache.

        Returns:
            Requests that ended because of it: with an error those that do not fit this executor, without one those that
            its limits make complete.
        """
        config = self._config
        self._info = info
        self._kv = KVCacheManager(info.num_blocks, info.block_size, config.enable_prefix_caching)
        self._limits = StepLimits(config, info)
        ended: list[tuple[Request, InvalidRequest | None]] = []
        for request in list(self._waiting):
            request.block_hashes.clear()  # the block size may be another
            try:
                self._resolve(request)
            except InvalidRequest as error:
                self._waiting.remove(request)
                request.finish(FinishReason.ERROR)
                ended.append((request, error))
            else:
                if reason := self._find_early_end(request):
                    self._waiting.remove(request)
                    request.finish(reason)
                    ended.append((request, None))
        return ended

    def detach(self) -> list[Request]:
        """The executor is gone: drops its steps and KV; its requests wait, in order, with their tokens.

        Returns:
            Requests that ended because every executor is lost that runs them.
        """
        condemned = charge(self._running, self._in_flight)
        for request in self._running:
            request.block_table = []
            request.num_cached_blocks = 0
            if request in condemned:
                request.finish(FinishReason.ERROR)
            else:
                request.preempt()
                self._waiting.push(request)
        self._running = []
        self._in_flight.clear()
        self._finished_request_ids = []
        self._last_step_id = 0
        self._info = self._kv = None
        self._has_leftovers = bool(self._waiting)
        return condemned

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> bool:
        """Takes a request in.

        Returns:
            False if it is complete already, as its resumed tokens satisfy an end condition; see its finish_reason.

        Raises:
            InvalidRequest: it cannot be served.
            QueueFull: max_waiting_requests wait already, and the request was not let in by an earlier attempt.
        """
        if self._info is not None:
            self._resolve(request)
            if reason := self._find_early_end(request):
                request.finish(reason)
                return False
        limit = self._config.max_waiting_requests
        if limit is not None and not request.is_resubmitted and len(self._waiting) >= limit + self._num_open_rows():
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting and {limit} may (max_waiting_requests); try again later"
            )
        request.order = self._policy(request, self._num_arrivals)
        self._num_arrivals += 1
        self._waiting.push(request)
        return True

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a live request at any moment; its blocks are free at once, its row with the next step."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request)
        request.finish(reason)

    # -- steps -------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Decides the next step, or None if nobody can run now or pipeline_depth steps are in flight."""
        if self._kv is None or len(self._in_flight) >= self._config.pipeline_depth:
            return None
        step = Step(self._last_step_id + 1)
        self._make_room_for_higher_priority(self._kv)
        num_preemptions = self.num_preemptions
        is_closed = self._quarantine.is_closed()
        if not is_closed and self._waiting and is_suspect(self._waiting.peek()):
            if self._in_flight:
                return None  # the others pause, so that a suspect is alone when it enters
            self._schedule_waiting(self._kv, step, self._limits.max_num_batched_tokens)
        if not step.request_ids:
            budget = self._schedule_running(self._kv, step)
            if num_preemptions == self.num_preemptions and not is_closed:
                self._schedule_waiting(self._kv, step, budget)
        self._has_leftovers = len(self._waiting) > 0
        # An idle executor hears of its free rows at once, a busy one with its next step.
        if not step.request_ids and (self._in_flight or not self._finished_request_ids):
            return None
        step.finished_request_ids, self._finished_request_ids = self._finished_request_ids, []
        self._last_step_id = step.step_id
        self._in_flight.append(step)
        return step

    def update(self, result: StepResult) -> Outputs:
        """Takes in what the oldest step in flight sampled. Tokens of requests that ended or were preempted meanwhile
        are dropped. A request that ended has its finish_reason set.

        Raises:
            ProtocolError: the result is not that step's.
        """
        if not self._in_flight:
            raise ProtocolError(f"the executor answered step {result.step_id}, but no step is in flight")
        step = self._in_flight.popleft()
        step.check(result)
        outputs = Outputs()
        alive, alive_token_ids = outputs.requests, outputs.token_ids
        any_ended = False
        for request, epoch, token_id in zip(step.sampled, step.epochs, result.token_ids, strict=True):
            if request.epoch != epoch:
                continue
            request.num_output_placeholders -= 1
            request.token_ids.append(token_id)
            request.num_losses = 0
            alive.append(request)
            alive_token_ids.append(token_id)
            # find_end decides; most tokens are ruled out without a call.
            if token_id in request.stop_token_ids or len(request.token_ids) >= request.max_num_tokens:
                reason = request.find_end()
                if reason is not None:
                    self._release(request)
                    request.finish(reason)
                    any_ended = True
        if any_ended:
            self._running = [request for request in self._running if not request.is_finished]
        if result.logprobs:
            index = {request.request_id: i for i, request in enumerate(alive)}
            for i, logprobs in result.logprobs.items():
                if (j := index.get(step.sampled[i].request_id)) is not None:
                    outputs.logprobs[j] = logprobs
        return outputs

    # -- what is going on --------------------------------------------------------------------------------------------

    @property
    def info(self) -> ExecutorInfo | None:
        return self._info

    @property
    def max_num_seqs(self) -> int:
        return self._limits.max_num_seqs

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_free_blocks(self) -> int:
        return self._kv.num_free_blocks if self._kv else 0

    def requests(self) -> Iterator[Request]:
        """All live requests, running ones first, each part in the policy's order."""
        yield from self._running
        yield from self._waiting

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, rows and queues agree."""
        if self._kv is not None:
            self._kv.check_integrity(self._running)
        orders = [request.order for request in self._running]
        assert orders == sorted(orders), "running is out of order"
        assert len(self._running) <= self._limits.max_num_seqs or self._kv is None, "more requests than rows"
        assert all(request.status is RequestStatus.RUNNING for request in self._running)
        assert not any(request.block_table for request in self._waiting), "a waiting request holds blocks"

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _schedule_running(self, kv: KVCacheManager, step: Step) -> int:
        """Schedules who runs already, decodes first, and preempts from the tail when blocks run out.

        Returns:
            What is left of the token budget.
        """
        budget = self._limits.max_num_batched_tokens
        prefills: list[Request] = []
        # The loop may pop from the tail while it goes: those are requests it has not reached yet, or the present one.
        for request in self._quarantine.runners(self._running):
            num_tokens = len(request.token_ids) + request.num_output_placeholders
            if num_tokens - request.num_computed_tokens > 1:
                prefills.append(request)
                continue
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is in flight
            new_block_ids = kv.allocate_slots(request, 1)
            while new_block_ids is None and request.status is RequestStatus.RUNNING:
                self._preempt_tail()
                new_block_ids = kv.allocate_slots(request, 1) if request.status is RequestStatus.RUNNING else None
            if new_block_ids is not None:
                self._run(kv, step, request, 1, new_block_ids)
                budget -= 1
        for request in prefills:
            if (num_new_tokens := self._chunk(request, budget, request.num_computed_tokens)) > 0:
                self._run(kv, step, request, num_new_tokens, [])
                budget -= num_new_tokens
        return budget

    def _schedule_waiting(self, kv: KVCacheManager, step: Step, budget: int) -> None:
        """Admits waiting requests in order until one does not fit."""
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting.peek()
            if is_suspect(request) and step.request_ids:
                return
            computed = kv.find_room(request, others_run=bool(self._running))
            if computed is None:
                return
            num_new_tokens = self._chunk(request, budget, computed.num_tokens)
            if num_new_tokens == 0:
                return
            self._waiting.pop()
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = computed.num_tokens
            if request.num_cached_tokens is None:
                request.num_cached_tokens = min(computed.num_tokens, request.num_prompt_tokens)
                self.num_prefix_queries += request.num_tokens
                self.num_prefix_hits += computed.num_tokens
            insort(self._running, request, key=by_order)
            step.admitted.append(request)
            step.new_requests.append(
                NewRequest(
                    request.request_id,
                    list(request.token_ids),
                    request.num_prompt_tokens,
                    computed.num_tokens,
                    kv.admit(request, computed),
                    request.sampling_params,
                )
            )
            self._run(kv, step, request, num_new_tokens, [])
            budget -= num_new_tokens
            if is_suspect(request):
                self._quarantine.enter(request)
                return

    def _chunk(self, request: Request, budget: int, num_computed_tokens: int) -> int:
        is_alone = len(self._running) + len(self._waiting) == 1
        return self._limits.chunk(len(request.token_ids) - num_computed_tokens, budget, is_alone)

    def _run(self, kv: KVCacheManager, step: Step, request: Request, num_tokens: int, block_ids: list[int]) -> None:
        """Puts a request into the step and advances its state as if the step were done."""
        step.request_ids.append(request.request_id)
        step.num_scheduled_tokens.append(num_tokens)
        step.num_new_blocks.append(len(block_ids))
        if block_ids:
            step.new_block_ids += block_ids
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
            request.num_output_placeholders += 1
            step.sampled.append(request)
            step.epochs.append(request.epoch)
        kv.cache_blocks(request)

    def _make_room_for_higher_priority(self, kv: KVCacheManager) -> None:
        """Preempts running requests of lower priority for the first waiting one, if it lacks a row or blocks and they
        suffice. Never happens under fcfs, where those that run came first."""
        if self._waiting and self._running and has_priority(self._waiting.peek(), self._running[-1]):
            num_open_rows = self._limits.max_num_seqs - len(self._running)
            for _ in range(num_victims(self._waiting.peek(), self._running, num_open_rows, kv)):
                self._preempt_tail()

    def _preempt_tail(self) -> None:
        """Takes blocks and row from the last of running; its tokens are computed again later."""
        request = self._running.pop()
        self._release(request)
        request.preempt()
        self._waiting.push(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        assert self._kv is not None
        self._kv.free(request)
        self._finished_request_ids.append(request.request_id)

    # -- checks ------------------------------------------------------------------------------------------------------

    def _resolve(self, request: Request) -> None:
        assert self._info is not None
        request.resolve(self._info)
        self._limits.check(request)

    def _find_early_end(self, request: Request) -> FinishReason | None:
        """Why a request that brings output along is complete already."""
        return request.find_end() if request.num_output_tokens else None

    def _num_open_rows(self) -> int:
        """Rows that newcomers would get in the next step. If the last step left requests behind, newcomers wait too."""
        return 0 if self._kv is None or self._has_leftovers else self._limits.max_num_seqs - len(self._running)
