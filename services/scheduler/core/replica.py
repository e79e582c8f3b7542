"""One executor group, as the scheduler sees it: its KV blocks, its limits, who runs on it, its steps in flight.

All of it is lost with the executor and starts over with the next one. Pure: no I/O.

Feature code does not belong here: who runs and what they hold is `rows.py`'s, what goes into a step `decision.py`'s,
who may not share one is `suspicion.py`'s, when to decide one is `pacing.py`'s, the end of a request is `request.py`'s.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.core.decision import Decision, Taker
from pagewire.services.scheduler.core.executor_info import ExecutorInfo
from pagewire.services.scheduler.core.fairness import Ledger
from pagewire.services.scheduler.core.loss import Loss
from pagewire.services.scheduler.core.outcome import Outputs, outcome
from pagewire.services.scheduler.core.request import FinishReason, Request, RequestStatus
from pagewire.services.scheduler.core.rows import Rows
from pagewire.services.scheduler.core.step import InvalidResult, ScheduledStep, StepResult
from pagewire.services.scheduler.core.suspicion import charge, is_doubtful
from pagewire.services.scheduler.core.waiting import WaitingQueue
from pagewire.services.scheduler.costs.cost_model import StepCosts
from pagewire.services.scheduler.costs.pacing import Pacer
from pagewire.services.scheduler.costs.prefill_budget import NO_LIMIT, PrefillTarget
from pagewire.services.scheduler.memory.group_blocks import GroupBlocks
from pagewire.services.scheduler.placement.place import Place

_INTERNAL = 13  # as gRPC numbers its codes


class Replica:
    """Decides its steps. An executor is attached when it is known, detached when it is lost; in between nobody runs."""

    def __init__(self, replica_id: int, config: SchedulerConfig, ledger: Ledger, name: str) -> None:
        """name: in metrics."""
        self.replica_id = replica_id
        self.name = name
        self.pacer = Pacer(config.pipeline_depth)
        self._config = config
        self._ledger = ledger
        self._target = PrefillTarget(config)
        self._rows = Rows(replica_id, config, ledger)
        self.place = Place(self._rows, self.prompt_room)
        # Incarnation of the last executor, and who was alone in a step when it was lost without a word.
        self._doubtful: tuple[int, list[Request]] | None = None
        self._start_over(None)

    def _start_over(self, info: ExecutorInfo | None) -> None:
        self._info = info
        self.is_leaving = False  # its executor still works, but is about to end
        self._rows.start_over(info)
        self._in_flight: deque[ScheduledStep] = deque()
        self._last_step_id = 0
        self.pacer.start_over(self._rows.num_stages)

    # -- executor ----------------------------------------------------------------------------------------------------

    def attach(self, info: ExecutorInfo) -> None:
        """Starts over on an executor with empty rows and an empty KV cache."""
        self._start_over(info)

    def charge(self, requests: Sequence[Request], loss: Loss) -> list[Request]:
        """The executor is lost: makes suspects of those of the live requests that it ran; returns who is the cause."""
        if self.is_leaving and not loss.is_told:
            return []
        condemned = charge(requests, self._in_flight, loss)
        doubtful = [request for request in requests if is_doubtful(request) and self._runs(request)]
        self._doubtful = None if self._info is None else (self._info.incarnation, doubtful)
        return condemned

    def explain(self, info: ExecutorInfo) -> list[Request]:
        """There is a successor: those to whom the executor was lost without a word, if it knows that it was lost to
        somebody."""
        known, self._doubtful = self._doubtful, None
        if known is None or not info.predecessor_failed or info.incarnation == known[0]:
            return []
        return [request for request in known[1] if is_doubtful(request) and not request.is_finished]

    def _runs(self, request: Request) -> bool:
        """Whether it is in a step in flight."""
        return any(request.request_id in step.request_ids for step in self._in_flight)

    def detach(self) -> list[Request]:
        """The executor is gone: drops its steps and KV. Returns the requests that go on elsewhere, in order."""
        running = self.running
        self._start_over(None)
        for request in running:
            request.forget_blocks()
            request.preempt()
        return running

    def drain(self) -> None:
        """Lets those that run end, and takes nobody else but who needs its weights."""
        self._rows.is_draining = True

    @property
    def is_draining(self) -> bool:
        return self._rows.is_draining

    @property
    def is_drained(self) -> bool:
        """Nobody runs, nothing is in flight, and the executor knows that."""
        return not (self.running or self._in_flight or self._rows.finished_request_ids)

    # -- requests ----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises InvalidRequest if no step here can ever take the request; without an executor none is refused."""
        if self._info is not None:
            self._rows.limits.check(request)

    def suits(self, request: Request) -> bool:
        """Whether its weights may compute a waiting request."""
        return self._rows.suits(request)

    def abort(self, request: Request) -> None:
        """Takes a running request out at any moment; its blocks are free at once, its row with the next step."""
        self._rows.remove(request)

    # -- steps -------------------------------------------------------------------------------------------------------

    def is_long(self, request: Request) -> bool:
        """Whether much of its prompt would have to be computed here."""
        longest, kv = self._rows.limits.long_prompt_tokens, self._rows.kv
        if kv is None or request.num_tokens <= longest:
            return False
        return request.num_tokens - kv.get_computed_blocks(request).num_tokens > longest

    @property
    def holds_long_back(self) -> bool:
        """Whether rows are open, but as many long prompts are computed as may."""
        longs = sum(one.is_long and one.is_prefilling for one in self.running)
        return self.num_open_rows > 0 and longs >= self._rows.limits.max_long_partial_prefills

    def schedule(self, waiting: WaitingQueue, taker: Taker) -> ScheduledStep | None:
        """Decides the next step, or None if nobody can run now. `can_schedule` must be true."""
        step = ScheduledStep(self._last_step_id + 1)
        rows = self._rows
        rows.load = None
        Decision(rows, self._ledger, self._target, waiting, taker, self._in_flight).fill(step)
        # An idle executor hears of its free rows at once, a busy one with its next step.
        if not step.request_ids and (self._in_flight or not rows.finished_request_ids):
            return None
        rows.load = None
        step.finished_request_ids, rows.finished_request_ids = rows.finished_request_ids, []
        self._last_step_id = step.step_id
        self._in_flight.append(step)
        return step

    def update(self, result: StepResult, seconds: float = 0.0) -> Outputs:
        """Takes in what the oldest step in flight brought. Tokens of requests that ended or were preempted meanwhile
        are dropped. A request that ended has its finish_reason set. seconds: of the step; 0: they are not known.

        Raises:
            InvalidResult: the result is not that step's.
        """
        if not self._in_flight:
            raise InvalidResult(f"the executor answered step {result.step_id}, but no step is in flight")
        step = self._in_flight[0]
        self._rows.load = None
        step.check(result)  # before it is let go: who is in it is charged if the executor is given up
        self._in_flight.popleft()
        refused = self._end_refused(step, result) if step.num_image_bytes or result.errors else []
        outputs = outcome(step, result)
        outputs.refused = refused
        self._rows.num_generation_tokens += len(outputs.token_ids)
        self._rows.speculation.learn(step, result, seconds)
        self._rows.costs.learn(step.work, seconds)
        if self._ledger.is_contended:
            self._ledger.charge_outputs((request.account for request in outputs.requests), outputs.num_tokens)
        for request, reason in outputs.ends:
            self._rows.release(request)
            request.finish(reason)
        if outputs.ends or refused:
            self._rows.running = [request for request in self._rows.running if not request.is_finished]
        return outputs

    def _end_refused(self, step: ScheduledStep, result: StepResult) -> list[tuple[Request, Any]]:
        """Ends those with whom the executor cannot go on; blocks of others who entered may be found from now on."""
        for request in step.admitted:
            request.is_accepted = request.is_accepted or request.request_id not in result.errors
        refused = [request for request in self.running if request.request_id in result.errors]
        for request in refused:
            self._rows.release(request)
            if result.errors[request.request_id].code == _INTERNAL and self._rows.kv is not None:
                self._rows.kv.forget(request)  # NaN in one of them would be NaN for whoever finds it
            request.finish(FinishReason.ERROR)
        return [(request, result.errors[request.request_id]) for request in refused]

    # -- how fast it is ------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> StepCosts:
        """Of steps on the executor that is attached."""
        return self._rows.costs

    def expected_drafts(self, step: ScheduledStep) -> float:
        """How many of the drafts that a step asks for are likely to be found."""
        return self._rows.speculation.expected(step)

    def prompt_room(self, num_decodes: float, num_short_prompts: float, num_tokens: float) -> float:
        """How many tokens of prompts a step computes beside so many decodes. num_short_prompts: that run, or could.
        num_tokens: of a prompt, on average."""
        seconds = self._target.seconds(
            self.costs, num_decodes, num_short_prompts, is_alone=False, is_contended=self._ledger.is_contended
        )
        room = max(1.0, self.max_num_batched_tokens - num_decodes)
        if seconds == NO_LIMIT or not self._rows.limits.splits_prompts:
            return room
        return min(room, max(1.0, self.costs.prompt_tokens_within(seconds, int(num_tokens / 2))))

    # -- what is going on --------------------------------------------------------------------------------------------

    @property
    def info(self) -> ExecutorInfo | None:
        """Of the executor that is attached."""
        return self._info

    @property
    def running(self) -> list[Request]:
        """In the policy's order; not to be changed."""
        return self._rows.running

    @property
    def has_suspect(self) -> bool:
        """Whether one runs here that may be the reason why executors fail."""
        return self._rows.quarantine.is_closed

    @property
    def num_preemptions(self) -> int:
        return self._rows.num_preemptions

    @property
    def num_prefix_queries(self) -> int:
        """Tokens looked up in the prefix cache."""
        return self._rows.num_prefix_queries

    @property
    def num_prefix_hits(self) -> int:
        """Tokens found."""
        return self._rows.num_prefix_hits

    @property
    def num_generation_tokens(self) -> int:
        """Tokens generated."""
        return self._rows.num_generation_tokens

    @property
    def max_num_seqs(self) -> int:
        return self._rows.limits.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        return self._rows.limits.max_num_batched_tokens

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_open_rows(self) -> int:
        return self._rows.num_open

    @property
    def can_schedule(self) -> bool:
        """Whether there is an executor, with fewer steps in flight than there may be."""
        return self._rows.kv is not None and len(self._in_flight) < self.pacer.max_in_flight

    @property
    def num_blocks(self) -> int:
        return self._rows.kv.num_blocks if self._rows.kv else 0

    @property
    def num_free_blocks(self) -> int:
        return self._rows.kv.num_free_blocks if self._rows.kv else 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that is in use, 0 to 1."""
        return self._rows.kv.usage if self._rows.kv else 0.0

    @property
    def kv_groups(self) -> Sequence[GroupBlocks]:
        """The blocks of each group of layers, to look at; none without an executor."""
        return self._rows.kv.groups if self._rows.kv else ()

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, rows and running requests agree."""
        if self._rows.kv is not None:
            self._rows.kv.check_integrity(self.running)
        orders = [request.order for request in self.running]
        assert orders == sorted(orders), "running is out of order"
        assert self.num_open_rows >= 0, "more requests than rows"
        for request in self.running:
            assert request.status is RequestStatus.RUNNING and request.replica_id == self.replica_id
