"""One executor group, as the scheduler sees it: its KV blocks, its limits, its running requests, its steps in flight.

All of it is lost with the executor and starts anew with the next one. Pure: no I/O.

Feature code does not belong here: running requests and what they hold are in `rows.py`, the contents of a step in
`step_builder.py`, the time to decide one in `pacing.py`, the end of a request in `request.py`, features in `seams.py`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.core.limits import StepLimits
from pagewire.services.scheduler.core.outcome import Outputs, outcome
from pagewire.services.scheduler.core.rows import Counts, Rows
from pagewire.services.scheduler.core.seams import Features, LostExecutor, Slots, Taker
from pagewire.services.scheduler.core.step_builder import StepBuilder
from pagewire.services.scheduler.core.waiting import WaitingQueue
from pagewire.services.scheduler.costs.cost_model import StepCosts
from pagewire.services.scheduler.costs.pacing import Pacer
from pagewire.services.scheduler.costs.prefill_budget import NO_LIMIT, PrefillTarget
from pagewire.services.scheduler.memory.block_index import BlockIndex
from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import InvalidResult, ScheduledStep, StepResult


class Replica:
    """Decides the steps of one executor, which is attached when it connects and detached when it is lost; without one,
    nothing runs."""

    def __init__(self, replica_id: int, config: SchedulerConfig, features: Features, name: str) -> None:
        """name: the label of the replica in metrics."""
        self.replica_id = replica_id
        self.name = name
        self.pacer = Pacer(config.pipeline_depth)
        self.counts = Counts()
        self._config = config
        self._features = features
        self._shares = features.shares
        self._target = PrefillTarget(config)
        self._index: BlockIndex | None = None
        self._rows = Rows(replica_id, config, None, features, self.counts, None)
        self._start_over(None)

    def _start_over(self, info: ExecutorInfo | None) -> None:
        self._info = info
        self.is_leaving = False  # its executor still serves, but is about to end
        self._rows.leave()
        self._rows = Rows(self.replica_id, self._config, info, self._features, self.counts, self._index)
        self._in_flight: deque[ScheduledStep] = deque()
        self._last_step_id = 0
        self.pacer.start_over(self._rows.num_stages)

    # -- executor ----------------------------------------------------------------------------------------------------

    def attach(self, info: ExecutorInfo) -> None:
        """Starts over on an executor with empty rows and an empty KV cache."""
        self._start_over(info)

    def lost(self, loss: Loss) -> LostExecutor:
        """Returns the facts about the executor, which is lost and about to be detached."""
        incarnation = None if self._info is None else self._info.incarnation
        return LostExecutor(self.replica_id, incarnation, self._in_flight, loss, self.is_leaving)

    def detach(self) -> list[Request]:
        """Drops the steps and the KV of a lost executor. Returns the requests that ran on it, in order and with their
        tokens, to wait again."""
        running = self._rows.running
        self._start_over(None)
        for request in running:
            request.blocks.drop()
            request.preempt()
        return running

    def drain(self, *, begins: bool = True) -> None:
        """Lets running requests end, and admits only those that need the weights of this executor; or no longer."""
        self._rows.is_draining = begins

    @property
    def is_draining(self) -> bool:
        return self._rows.is_draining

    @property
    def is_drained(self) -> bool:
        """True if no request runs, no step is in flight, and the executor has freed all rows."""
        return not (self.running or self._in_flight or self._rows.has_unreported)

    def share_index(self, index: BlockIndex) -> None:
        """Keeps the index up to date with the blocks of this replica from now on; does nothing if the replica already
        has an index."""
        if self._index is None:
            self._index = index
            self.kv.share_index(index)

    # -- requests ----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises InvalidRequest if no step of this executor can ever take the request; without an executor, no request
        is refused."""
        if self._info is not None:
            self.limits.check(request)

    def suits(self, request: Request) -> bool:
        """Returns whether this executor's weights may compute a waiting request, with its adapter if it has one."""
        return self._rows.suits(request)

    def has_room_for(self, request: Request) -> bool:
        """Returns whether the request could be admitted to a step that is decided now."""
        return self._info is not None and self._rows.has_room_for(request)

    def abort(self, request: Request) -> None:
        """Removes a running request at any moment: its blocks are freed at once, its row with the next step."""
        self._rows.remove(request)

    # -- steps -------------------------------------------------------------------------------------------------------

    def is_long(self, request: Request) -> bool:
        """Returns whether the prompt is long: a large part of it would have to be computed here."""
        longest = self.limits.long_prompt_tokens
        if self._info is None or request.num_tokens <= longest:
            return False
        found = self.kv.get_computed_blocks(request).num_tokens
        if self.kv.tiers is not None:
            found = self.kv.tiers.num_reachable_tokens(request)
        return request.num_tokens - found > longest

    @property
    def holds_long_back(self) -> bool:
        """True if rows are open, but the limit of concurrent long prompts is reached."""
        longs = sum(one.is_long and one.is_prefilling for one in self.running)
        return self.num_open_rows > 0 and longs >= self.limits.max_long_partial_prefills

    def schedule(self, waiting: WaitingQueue, taker: Taker) -> ScheduledStep | None:
        """Decides the next step, or returns None if nothing can run now. `can_schedule` must be true."""
        step, rows = ScheduledStep(self._last_step_id + 1), self._rows
        StepBuilder(rows, self._shares, self._target, waiting, taker, self._in_flight).fill(step)
        # An idle executor frees rows and loads at once, a busy one with its next step.
        if not step.request_ids and (self._in_flight or not rows.has_unreported):
            return None
        rows.end_step(step)
        self._last_step_id = step.step_id
        self._in_flight.append(step)
        return step

    def update(self, result: StepResult, seconds: float = 0.0) -> Outputs:
        """Takes in the result of the oldest step in flight. Tokens of requests that ended or were preempted meanwhile
        are dropped. A request that ended has its finish_reason set. seconds: the duration of the step; 0: unknown.

        Raises:
            InvalidResult: the result belongs to another step.
        """
        if not self._in_flight:
            raise InvalidResult(f"the executor answered step {result.step_id}, but no step is in flight")
        step, rows = self._in_flight[0], self._rows
        step.check(result)  # before the step is dropped: if the executor is given up, its requests become suspects
        self._in_flight.popleft()
        refused = rows.accept(step, result.errors) if step.num_image_bytes or result.errors else []
        outputs = outcome(step, result)
        outputs.refused = refused
        rows.drafts.learn(step, result, seconds)
        rows.costs.learn(step.work, seconds)
        self._shares.charge_outputs(outputs.requests, outputs.num_tokens)
        rows.take_in(outputs)
        return outputs

    # -- speed -------------------------------------------------------------------------------------------------------

    @property
    def costs(self) -> StepCosts:
        """The cost model of steps on the attached executor."""
        return self._rows.costs

    def expected_seconds(self, step: ScheduledStep) -> float:
        """Returns the expected duration of a step, with the drafts that are likely to be found; 0 if unknown."""
        work = step.work
        if step.drafts_of:
            num_lacking = sum(step.drafts_of.values()) - int(self._rows.drafts.expected(step))
            work = replace(work, num_decodes=work.num_decodes - num_lacking)
        return self.costs.foreseen(work)

    def prompt_room(self, num_decodes: float, num_short_prompts: float, num_tokens: float) -> float:
        """Returns how many prompt tokens a step computes next to `num_decodes` decodes. num_short_prompts: short
        prompts that run or could run. num_tokens: the average length of a prompt."""
        seconds = self._target.seconds(
            self.costs, num_decodes, num_short_prompts, is_alone=False, is_contended=self._shares.is_contended
        )
        room = max(1.0, self.limits.max_num_batched_tokens - num_decodes)
        if seconds == NO_LIMIT or not self.limits.splits_prompts:
            return room
        return min(room, max(1.0, self.costs.prompt_tokens_within(seconds, int(num_tokens / 2))))

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ExecutorInfo | None:
        """The facts about the attached executor."""
        return self._info

    @property
    def limits(self) -> StepLimits:
        return self._rows.limits

    @property
    def kv(self) -> KVCacheManager:
        """The KV memory; it has no blocks without an executor."""
        return self._rows.kv

    @property
    def running(self) -> Sequence[Request]:
        """The running requests, in the policy's order."""
        return self._rows.running

    @property
    def version(self) -> tuple[object, int]:
        """Changes when requests begin or end, and with each step."""
        return self._rows, self._rows.version

    @property
    def slots(self) -> Slots:
        """The slots for adapters; there are none without an executor."""
        return self._rows.slots

    @property
    def has_suspect(self) -> bool:
        """True while a suspect runs here."""
        return self._rows.quarantine.is_closed

    @property
    def num_running(self) -> int:
        return len(self._rows.running)

    @property
    def num_open_rows(self) -> int:
        return self._rows.num_open

    @property
    def can_schedule(self) -> bool:
        """True if there is an executor with fewer steps in flight than the maximum."""
        return self._info is not None and len(self._in_flight) < self.pacer.max_in_flight
