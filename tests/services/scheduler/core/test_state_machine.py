"""Whatever happens to the scheduler, in whatever order: each request ends once, with the oracle's tokens, in bounded
time.

Beyond what `test_properties.py` plays: schedulers die and their requests are submitted again, clients leave and come
back for the rest, deadlines pass, prompts kill executors or are refused, steps take time, new requests are refused.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import QueueFull
from pagewire.services.scheduler.core.wakes import Wakes
from pagewire.services.scheduler.fairness.ledger import Account
from pagewire.services.scheduler.memory.reset import reset
from pagewire.services.scheduler.placement.integrity import check_integrity
from pagewire.services.scheduler.service.deadlines import Deadlines
from pagewire.services.scheduler.suspicion.suspects import MAX_SILENT_LOSSES
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import ScheduledStep
from tests.fakes import FakeExecutor, FakeExecutorDied
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.strategies import ROLES, Arrival, add, arrivals, expected_prompt_logprobs, lines
from tests.sweep import examples

# Prompts that begin with these kill an executor, or are refused by it.
DEADLY, REFUSED = 48, 49
NUM_ROUNDS_WITHOUT_TOKENS = 4  # until the steps in flight are back and the rows are free
ONE_OR_TWO = st.integers(1, 2)
MAX_WAITING = st.sampled_from([4096, 4096, 1, 3])
ANY: dict[str, Any] = {"max_waiting": MAX_WAITING, "has_tier": st.booleans(), "roles": ROLES}
ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass
class Generation:
    """The submissions of one client's request."""

    arrival: Arrival
    request: Request  # of the present submission, to `line`
    line: PureLine
    expected: list[int]  # what the client must get
    expected_prompt_logprobs: list[Any]
    before: list[int] = field(default_factory=list)  # tokens of earlier submissions
    cause: FinishReason | None = None  # why it was ended from outside

    @property
    def is_deadly(self) -> bool:
        return self.arrival.prompt[0] == DEADLY

    @property
    def may_return(self) -> bool:
        """True after its client has left."""
        return self.cause is FinishReason.ABORT

    @property
    def delivered(self) -> list[int]:
        return self.before + self.line.outputs[self.request.request_id]

    @property
    def ends(self) -> list[FinishReason]:
        return self.line.ends[self.request.request_id]


class WatchedLine(PureLine):
    """Sees to it that a step is for those that run, takes an executor away that died of one, and wakes replicas as the
    service does."""

    def __init__(self, *executors: FakeExecutor, **config: Any) -> None:
        super().__init__(*executors, **config)
        self.num_deadly_steps = 0
        self.wakes = Wakes(self.scheduler)
        self.woken: dict[Replica, None] = {}  # have a reason to decide, in this order

    def wake(self, replicas: Iterable[Replica]) -> None:
        self.woken.update(dict.fromkeys(replicas))

    def wake_all(self) -> None:
        self.wake(self.scheduler.replicas)

    def forget(self, replica: Replica) -> None:
        """Forgets a removed replica."""
        self.wakes.forget(replica)
        self.woken.pop(replica, None)
        self.wake_all()

    def play(self, index: int) -> ScheduledStep | None:
        """Decides a step and executes it, which the executor may not survive."""
        replica = self.scheduler.replicas[index]
        self.woken.pop(replica, None)
        try:
            step = self.schedule(index)
        except FakeExecutorDied:
            self.num_deadly_steps += 1
            num_crashers = len(self.crashers)
            self.lose(index)
            self.wake_all()
            crashers = self.crashers[num_crashers:]
            assert all(request.token_ids[0] == DEADLY for request in crashers), "an innocent neighbour ended"
            return None
        self.wake(self.wakes.after_decision(replica, step))
        if step is not None:
            self.wake([replica])  # until nothing more runs
            running = {request.request_id for request in self.scheduler.replicas[index].running}
            assert running.issuperset(step.request_ids), "a request runs that has ended"
            assert running == self.executors[index].rows.keys(), "a request that ended has a row after the next step"
        return step


class SchedulerMachine(RuleBasedStateMachine):
    """One or two replicas with few rows and blocks."""

    @initialize(
        line=st.one_of(
            lines(ONE_OR_TWO, max_draft_tokens=st.sampled_from([0, 3]), **ANY),
            lines(ONE_OR_TWO, windows=st.just([5]), **ANY),
            lines(ONE_OR_TWO, states=st.just(2), **ANY),
        ),
        token_seconds=st.sampled_from([0.0, 0.0001, 0.01, 1.0]),
    )
    def start(self, line: PureLine, token_seconds: float) -> None:
        """Starts with no request. token_seconds: that a step takes for each of its tokens."""
        self.token_seconds = token_seconds
        self.executors = line.executors
        for executor in self.executors:
            executor.deadly_token_id, executor.refused_token_id = DEADLY, REFUSED
        self.config = vars(line.config)
        self.max_model_len = line.max_model_len
        self.line = self.new_line()
        self.attach_all()
        self.generations: list[Generation] = []
        self.deadlines, self.now = Deadlines(), 0.0
        self.num_losses = 0

    def new_line(self) -> WatchedLine:
        """A scheduler without an executor yet."""
        for executor in self.executors:
            executor.reset()
        return WatchedLine(*self.executors, max_model_len=self.max_model_len, attach=False, **self.config)

    @property
    def live(self) -> list[Generation]:
        return [generation for generation in self.generations if not generation.request.is_finished]

    def index_of(self, number: int) -> int:
        return number % len(self.executors)

    def is_attached(self, index: int) -> bool:
        return self.line.scheduler.replicas[index].info is not None

    # -- clients -----------------------------------------------------------------------------------------------------

    @rule(
        arrival=arrivals(),
        first=st.sampled_from([None] * 6 + [DEADLY, REFUSED]),
        n=st.sampled_from([1, 1, 2, 3]),
        timeout=st.sampled_from([None, None, 0.5, 3.0]),
    )
    def arrive(self, arrival: Arrival, first: int | None, n: int, timeout: float | None) -> None:
        """Submits a request. first: what the prompt begins with; None: any. n: with so many outputs. timeout:
        seconds."""
        if first is not None:
            own_tokens = (first, *arrival.own_tokens[1:])
            arrival = Arrival(**{**vars(arrival), "num_prefix_tokens": 0, "own_tokens": own_tokens, "num_resumed": 0})
        for _ in range(n):
            try:
                request, expected = add(self.line, arrival)
            except QueueFull:
                assert self.line.scheduler.num_waiting, "refused before an empty queue"
                return
            if not request.is_finished:
                self.line.wake(self.line.wakes.after_arrival(request))
            told = expected_prompt_logprobs(request)
            self.generations.append(Generation(arrival, request, self.line, expected, told))
            if timeout is not None and not request.is_finished:
                self.deadlines.add(len(self.generations) - 1, self.now + timeout)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 9))
    def abort(self, number: int) -> None:
        self.end(self.live[number % len(self.live)], FinishReason.ABORT)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        """Ends requests after their deadlines."""
        self.now += seconds
        for index in self.deadlines.take_due(self.now):
            if not self.generations[index].request.is_finished:
                self.end(self.generations[index], FinishReason.ERROR)

    def end(self, generation: Generation, reason: FinishReason) -> None:
        """Aborts a request: its blocks are free at once, whatever is in flight, and its row with the next step."""
        self.line.abort(generation.request, reason)
        self.line.wake(self.line.wakes.after_end())
        generation.cause = reason
        assert not generation.request.blocks.held

    @precondition(lambda self: any(generation.may_return for generation in self.generations))
    @rule(number=st.integers(0, 9), num_unread=st.sampled_from([0, 0, 1, 5, 99]), is_known=st.booleans())
    def come_back_for_the_rest(self, number: int, num_unread: int, is_known: bool) -> None:
        """A client that left goes on after the tokens that it has read. is_known: the line has let it in before."""
        away = [generation for generation in self.generations if generation.may_return]
        generation = away[number % len(away)]
        read = generation.delivered[: max(0, len(generation.delivered) - num_unread)]
        try:
            request, _ = add(self.line, generation.arrival, read, is_resubmitted=is_known)
        except QueueFull:
            assert not is_known, "turned away in the middle of an answer"
            return
        if not request.is_finished:
            self.line.wake(self.line.wakes.after_arrival(request))
        generation.request, generation.line, generation.before, generation.cause = request, self.line, read, None

    # -- executors ---------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 1), times=st.integers(1, 3))
    def schedule(self, number: int, times: int) -> None:
        for _ in range(times):
            self.line.play(self.index_of(number))

    @rule(number=st.integers(0, 1), stall=st.sampled_from([0.0, 0.0, 0.0, 5.0]))
    def receive(self, number: int, stall: float) -> None:
        """Takes in a result. stall: seconds that the step took beyond what it should."""
        index = self.index_of(number)
        if self.line.num_in_flight(index):
            self.take_in(index, stall)

    def take_in(self, index: int, stall: float = 0.0) -> None:
        self.line.receive(index, self.seconds_of_step(index) + stall)
        self.line.wake(self.line.wakes.after_result(self.line.scheduler.replicas[index]))

    def seconds_of_step(self, index: int) -> float:
        """Returns the seconds of the oldest step in flight: a little for any step, the rest by its work."""
        work = self.line.oldest_in_flight(index).work
        return 0.001 + self.token_seconds * (work.num_decodes + work.num_prompt_tokens)

    @rule(number=st.integers(0, 1), which=st.integers(0, 3), lost=st.sets(st.integers(0, 9)))
    def load_ends(self, number: int, which: int, lost: set[int]) -> None:
        """Ends one of the loads that are under way. lost: indices of blocks that cannot be read."""
        index = self.index_of(number)
        if num_loads := len(self.executors[index].loads):
            self.end_load(index, which % num_loads, lost)

    @rule(num_gone=st.integers(0, 3))
    def tell_tiers(self, num_gone: int) -> None:
        """Tells the scheduler what the tiers hold, of which some is gone meanwhile."""
        self.line.tell_tiers()
        tier = self.executors[0].tier
        for key in list(tier.blocks)[:num_gone] if tier is not None else ():
            tier.remove(*key)  # type: ignore[union-attr]

    @rule(num_rounds=st.integers(2, 12))
    def run_on(self, num_rounds: int) -> None:
        """Undisturbed for a while, so that much is learned, cached and preempted before the next mishap."""
        for _ in range(num_rounds):
            self.run_round()

    def run_round(self) -> bool:
        """Every replica that has a reason to decide does so, until none has; then each executor answers one step.
        False: there was none."""
        while self.line.woken:
            self.line.play(self.line.scheduler.replicas.index(next(iter(self.line.woken))))
        self.line.tell_tiers()
        busy = [index for index in range(len(self.executors)) if self.line.num_in_flight(index)]
        for index in busy:
            self.take_in(index)
        loading = [index for index, executor in enumerate(self.executors) if executor.loads]
        for index in loading:
            self.end_load(index)
        return bool(busy or loading)

    def end_load(self, index: int, number: int = 0, lost: Collection[int] = ()) -> None:
        self.line.end_load(index, number, lost)
        self.line.wake([self.line.scheduler.replicas[index]])

    @rule(number=st.integers(0, 1), returns=st.booleans())
    def die(self, number: int, returns: bool) -> None:
        index = self.index_of(number)
        if self.is_attached(index):
            self.num_losses += 1
            self.line.lose(index)
            self.line.wake_all()
            if returns:
                self.attach(index)

    @rule(number=st.integers(0, 1), num_rows=st.integers(1, 6))
    def come_back(self, number: int, num_rows: int) -> None:
        """An executor that was lost, or its successor, which may have more or fewer rows."""
        index = self.index_of(number)
        if not self.is_attached(index):
            self.executors[index].max_num_seqs = num_rows
            self.attach(index)

    @rule()
    def reset_prefix_caches(self) -> None:
        for replica in self.line.scheduler.replicas:
            reset(replica.kv, replica.running)

    # -- the scheduler -----------------------------------------------------------------------------------------------

    @rule(attached_first=st.booleans())
    def scheduler_dies(self, attached_first: bool) -> None:
        """Starts another scheduler with all requests and the tokens that clients have; none is refused."""
        live = self.live
        self.line = self.new_line()
        if attached_first:
            self.attach_all()
        for generation in live:
            delivered = generation.delivered
            request, _ = add(self.line, generation.arrival, delivered, is_resubmitted=True)
            generation.request, generation.line, generation.before = request, self.line, delivered
            if not request.is_finished:
                self.line.wake(self.line.wakes.after_arrival(request))

    def attach(self, index: int) -> None:
        self.line.attach(index)
        self.line.wake_all()

    def attach_all(self) -> None:
        for index in range(len(self.executors)):
            if not self.is_attached(index):
                self.attach(index)

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def state_is_sound(self) -> None:
        check_integrity(self.line.scheduler)
        requests = list(self.line.scheduler.requests())
        live = [generation.request for generation in self.live]
        assert sorted(map(id, requests)) == sorted(map(id, live)), "a request is lost, or ended and still here"
        for account in {request.account for request in requests}:
            assert_counted(account, [request for request in requests if request.account is account])

    @invariant()
    def clients_have_the_tokens_of_the_oracle(self) -> None:
        for generation in self.generations:
            delivered, is_finished = generation.delivered, generation.request.is_finished
            assert delivered == generation.expected[: len(delivered)]
            assert len(generation.ends) == is_finished, "it must end exactly once"

    @invariant()
    def poison_costs_few_executors(self) -> None:
        num_deadly = sum(generation.is_deadly and generation.line is self.line for generation in self.generations)
        assert self.line.num_deadly_steps <= MAX_SILENT_LOSSES * num_deadly

    # -- the end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Runs from any state until all requests have ended, soon and rightly, and everything is free again."""
        if not hasattr(self, "generations"):
            return
        self.run_out()
        for generation in self.generations:
            self.check_end(generation)
        for replica, executor in zip(self.line.scheduler.replicas, self.executors, strict=True):
            assert replica.kv.num_free_blocks == sum(group.num_blocks for group in executor.kv_groups), "a block leaks"
            assert not executor.rows, "a row leaks"

    def run_out(self) -> None:
        """Runs until all have ended. No round is idle, each computes a token at least, and none is computed again
        except after a preemption, which only makes room for a request that gains a token. So none starves."""
        live, before = self.live, [generation.request.num_preemptions for generation in self.live]
        num_rounds = num_deaths = 0
        while self.live:
            self.attach_all()
            is_busy = self.run_round()
            has_died = self.line.num_deadly_steps > num_deaths
            assert is_busy or has_died or not self.live, "nothing runs, though a request waits"
            num_deaths = self.line.num_deadly_steps
            num_rounds += 1
            assert num_rounds <= most_rounds(live, before), "requests starve"
        for _ in range(NUM_ROUNDS_WITHOUT_TOKENS):
            self.run_round()
        self.attach_all()

    def check_end(self, generation: Generation) -> None:
        """Checks that a request ended as it had to."""
        (reason,) = generation.ends
        request, line = generation.request, generation.line
        if generation.cause is not None:
            assert reason is generation.cause
        elif request in line.crashers:
            assert generation.is_deadly or self.num_losses, "no executor died of it"
        elif reason is FinishReason.ERROR:
            assert generation.arrival.prompt[0] == REFUSED and not generation.delivered
        else:
            assert reason in ENDS and generation.delivered == generation.expected
            if not generation.before:
                assert line.prompt_logprobs.get(request.request_id, []) == generation.expected_prompt_logprobs


def most_rounds(generations: Sequence[Generation], preempted_before: Sequence[int]) -> int:
    """Returns the rounds in which these end if each round computes one token: those of each, and up to two that were in
    flight at its end, once and whenever it lost its blocks since."""
    num_tokens = 0
    for generation, before in zip(generations, preempted_before, strict=True):
        length = len(generation.arrival.prompt) + len(generation.arrival.expected(generation.line.max_num_tokens()))
        num_tokens += (length + 2) * (1 + generation.request.num_preemptions - before)
    return num_tokens + NUM_ROUNDS_WITHOUT_TOKENS


def assert_counted(account: Account, requests: Sequence[Request]) -> None:
    """Checks that a tenant's account knows how many of its requests run and wait."""
    num_running = sum(request.replica_id is not None for request in requests)
    assert (account.num_running, account.num_waiting) == (num_running, len(requests) - num_running)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
