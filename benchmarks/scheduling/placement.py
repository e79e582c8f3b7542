"""Simulates the prefix hits and the balance of several executors, by --placement.

    python -m benchmarks.scheduling.placement                # prints a table
    python -m benchmarks.scheduling.placement --trace shared --loads 3

The scheduler is the real one, the clock is simulated, and a formula gives the time of a step
(`benchmarks/scheduling/simulation.py`). Conversations begin with one of a few system prompts, some more popular than
others, and return with their history. Requests arrive independently; every rule gets the same ones.
"""

import argparse
import heapq
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.scheduling.simulation import cpu_seconds
from pagewire.config import SchedulerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.services.scheduler.compose import make_scheduler
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, KVGroup
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult
from pagewire.v1.common_pb2 import SamplingParams

RULES = ("round_robin", "least_load", "cache_aware")


@dataclass(frozen=True)
class Trace:
    """A trace of requests; lengths are in tokens."""

    num_requests: int = 2000
    num_system_prompts: int = 64
    system_tokens: int = 1000
    user_tokens: int = 60
    output_tokens: int = 50
    num_turns: int = 4
    think_seconds: float = 10.0
    zipf: float = 1.0  # the n-th most popular system prompt has a share of n ** -zipf
    seed: int = 1


TRACES = {
    "conversations": Trace(),
    # As the shared-prefix benchmarks of SGLang and vLLM: 64 long prompts, equally popular, with a question each time.
    "shared": Trace(system_tokens=2048, user_tokens=128, output_tokens=64, num_turns=1, zipf=0.0),
    # Many tenants, each with a long system prompt of its own; most requests are one question.
    "tenants": Trace(num_system_prompts=128, system_tokens=1024, user_tokens=100, num_turns=1, zipf=0.6),
    # Agents of few kinds: their turns follow each other quickly and bring the results of tools.
    "agents": Trace(
        num_system_prompts=8, system_tokens=800, user_tokens=250, output_tokens=40, num_turns=10, think_seconds=2.0
    ),
}


@dataclass
class Fleet:
    """The replicas. num_blocks: of 16 tokens, per replica. load: arrivals, relative to the rate of replicas that run
    one request at a time with nothing cached."""

    num_replicas: int = 4
    num_blocks: int = 3072
    max_num_seqs: int = 32
    load: float = 1.0


@dataclass
class Outcome:
    """The results. busy: seconds that each replica has computed. ttft: from arrival to the first token, seconds."""

    hit_rate: float
    busy: list[float]
    num_requests: list[int]  # of each replica
    ttft: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def balance(self) -> float:
        """Jain's index of the seconds of work: 1 = all the same, 1/n = one does everything."""
        return sum(self.busy) ** 2 / (len(self.busy) * sum(busy * busy for busy in self.busy))

    @property
    def utilization(self) -> float:
        return statistics.mean(self.busy) / self.seconds

    @property
    def peak(self) -> float:
        """The busiest's work, times the mean."""
        return max(self.busy) / statistics.mean(self.busy)


@dataclass
class Turn:
    """A request of a conversation."""

    conversation: int
    number: int
    prompt: list[int]
    max_tokens: int
    arrival: float = 0.0


def conversations(trace: Trace, rate: float) -> Iterator[Turn]:
    """First turns, in the order of their arrivals."""
    draw = random.Random(trace.seed)
    weights = [(rank + 1) ** -trace.zipf for rank in range(trace.num_system_prompts)]
    now = 0.0
    for number in range(trace.num_requests // trace.num_turns):
        now += draw.expovariate(rate / trace.num_turns)
        (which,) = draw.choices(range(trace.num_system_prompts), weights)
        system = [1 + (which * 7919 + i * 31) % 30_000 for i in range(trace.system_tokens)]
        yield Turn(number, 1, [*system, *_words(draw, trace.user_tokens)], _length(draw, trace.output_tokens), now)


def _words(draw: random.Random, mean: int) -> list[int]:
    return [draw.randrange(1, 30_000) for _ in range(_length(draw, mean))]


def _length(draw: random.Random, mean: int) -> int:
    return max(1, min(8 * mean, int(draw.expovariate(1 / mean))))


def run(rule: str, trace: Trace, fleet: Fleet, **config: Any) -> Outcome:
    """Simulates until all requests have ended."""
    line = _Line(rule, fleet, **config)
    mean_tokens = trace.system_tokens + trace.user_tokens * 2
    alone = mean_tokens * 0.00042 + trace.output_tokens * 0.00355
    draw = random.Random(trace.seed + 1)
    rate = fleet.num_replicas * fleet.load / alone
    coming = [(turn.arrival, turn.conversation, turn) for turn in conversations(trace, rate)]
    heapq.heapify(coming)
    while coming or line.is_busy:
        if coming and coming[0][0] <= line.next_result:
            line.add(heapq.heappop(coming)[2])
            continue
        for turn, tokens in line.advance():
            if turn.number < trace.num_turns:
                again = Turn(turn.conversation, turn.number + 1, tokens + _words(draw, trace.user_tokens), 0)
                again.max_tokens = _length(draw, trace.output_tokens)
                again.arrival = line.now + draw.expovariate(1 / trace.think_seconds)
                heapq.heappush(coming, (again.arrival, again.conversation, again))
    return line.outcome()


class _Line:
    """One scheduler and its executors, which are a formula."""

    def __init__(self, rule: str, fleet: Fleet, **config: Any) -> None:
        self.scheduler = make_scheduler(SchedulerConfig(placement=rule, **config), fleet.num_replicas)
        for number, replica in enumerate(self.scheduler.replicas):
            self.scheduler.attach(replica, _info(number, fleet))
        self.now = 0.0
        self._ends: list[tuple[float, int]] = []  # when the oldest step of each busy replica ends
        self._steps: list[deque[ScheduledStep]] = [deque() for _ in self.scheduler.replicas]
        self._seconds: list[deque[float]] = [deque() for _ in self.scheduler.replicas]
        self._outcome = Outcome(0.0, [0.0] * fleet.num_replicas, [0] * fleet.num_replicas)
        self._turns: dict[Request, Turn] = {}
        self._has_token: set[Request] = set()
        self._num_requests = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._ends)

    @property
    def next_result(self) -> float:
        return self._ends[0][0] if self._ends else float("inf")

    def add(self, turn: Turn) -> None:
        self.now = max(self.now, turn.arrival)
        self._num_requests += 1
        params = resolve(SamplingParams(max_tokens=turn.max_tokens, ignore_eos=True, seed=1))
        request = Request(self._num_requests, turn.prompt, params)
        self._turns[request] = turn
        self.scheduler.add_request(request)
        self._decide(self.scheduler.placement.choice(request))

    def advance(self) -> list[tuple[Turn, list[int]]]:
        """Takes the next result; returns the requests that ended with it, and all its tokens."""
        self.now, number = heapq.heappop(self._ends)
        step, seconds = self._steps[number].popleft(), self._seconds[number].popleft()
        self._outcome.busy[number] += seconds
        ids = [request.request_id for request in step.sampled]
        result = StepResult(step.step_id, ids, [1] * len(ids), [30_001 + i % 97 for i in ids])
        replica = self.scheduler.replicas[number]
        outputs = self.scheduler.update(replica, result, seconds)
        for request in outputs.requests:
            if request not in self._has_token:
                self._has_token.add(request)
                self._outcome.ttft.append(self.now - self._turns[request].arrival)
        if self._seconds[number]:
            heapq.heappush(self._ends, (self.now + self._seconds[number][0], number))
        self._decide(replica)
        return [(self._turns.pop(request), list(request.token_ids)) for request, _ in outputs.ends]

    def _decide(self, first: Replica | None) -> None:
        """Keeps one step in flight: the next one is held back until it ends. first: the replica with the first turn."""
        placement = self.scheduler.placement
        deciders = deque([first] if first is not None else [])
        while deciders:
            replica = deciders.popleft()
            number = replica.replica_id
            if self._steps[number] or (step := self.scheduler.schedule(replica)) is None:
                deciders += placement.take_wanted()
                continue
            deciders += placement.take_wanted()
            seconds = cpu_seconds(step.work) if step.request_ids else 0.0
            self._outcome.num_requests[number] += len(step.admitted)
            self._steps[number].append(step)
            self._seconds[number].append(seconds)
            heapq.heappush(self._ends, (self.now + seconds, number))

    def outcome(self) -> Outcome:
        replicas = self.scheduler.replicas
        queries = sum(replica.counts.num_prefix_queries for replica in replicas)
        self._outcome.hit_rate = sum(replica.counts.num_prefix_hits for replica in replicas) / queries
        self._outcome.seconds = self.now
        return self._outcome


def _info(number: int, fleet: Fleet) -> ExecutorInfo:
    return ExecutorInfo(
        incarnation=number + 1,
        model="none",
        max_model_len=8192,
        vocab_size=50_000,
        eos_token_ids=frozenset(),
        max_logprobs=0,
        kv_groups=(KVGroup(fleet.num_blocks),),
        block_size=16,
        max_num_seqs=fleet.max_num_seqs,
        max_num_batched_tokens=2048,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=Trace.num_requests)
    parser.add_argument("--replicas", type=int, default=Fleet.num_replicas)
    parser.add_argument("--loads", default="0.5,1,1.5", help="of the arrivals, comma separated")
    parser.add_argument("--blocks", type=int, default=Fleet.num_blocks, help="of 16 tokens, of each executor")
    parser.add_argument("--trace", choices=TRACES, default="conversations")
    arguments = parser.parse_args()
    trace = replace(TRACES[arguments.trace], num_requests=arguments.requests)
    print(f"{arguments.replicas} executors, {trace}\n")
    print("| load | rule | hit rate | balance (Jain) | busiest / mean | utilization | work, s | TTFT p50, s | p99, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for load in map(float, arguments.loads.split(",")):
        fleet = Fleet(num_replicas=arguments.replicas, num_blocks=arguments.blocks, load=load)
        for rule in RULES:
            one = run(rule, trace, fleet)
            cuts = statistics.quantiles(one.ttft, n=100)
            print(
                f"| {load:g} | {rule} | {one.hit_rate:.1%} | {one.balance:.4f} | {one.peak:.3f} "
                f"| {one.utilization:.0%} | {sum(one.busy):.0f} | {statistics.median(one.ttft):.3f} | {cuts[98]:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
