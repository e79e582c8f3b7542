"""A fleet: schedulers with their replicas, one workload in front of them, and executors that die and come back."""

import random
import resource
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fleet.devices import BLOCK_SIZE, DEVICES
from benchmarks.fleet.front import front
from benchmarks.fleet.line import Line, Stream
from benchmarks.fleet.tiers import KINDS, Store
from benchmarks.fleet.timeline import Timeline
from benchmarks.fleet.workload import Shape, Turn, Workload
from pagewire.config import SchedulerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.services.scheduler.placement.integrity import check_integrity
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.common_pb2 import SamplingParams

# Of a scheduler's work.
PARTS = ("add", "forecast", "wakes", "pacing", "schedule", "update", "metrics", "messages")
_MAX_CHECKED = 100_000  # requests times replicas; more would take longer to check than to serve


@dataclass(frozen=True)
class Case:
    """The parameters of a simulation."""

    num_replicas: int
    num_requests: int
    num_schedulers: int = 1
    device: str = "h100-8b"
    rate: float | None = None  # requests per second and replica; None: the device's
    num_blocks: int | None = None  # None: the device's
    front: str = "conversation"
    num_deaths: int = 0  # of executors, one after another, evenly over the time of arrivals
    down_seconds: float = 10.0  # until the next one is there
    late: float = 0.0  # share of replicas that join in the middle
    tier: str | None = None  # host, disk, or none
    tier_gib: float = 64.0  # per replica
    sharing: int = 1  # replicas that share a tier: those of one host
    prefill: float = 0.0  # share of replicas that only compute prompts; the others then only decode
    shape: Shape = field(default_factory=Shape)
    seed: int = 1
    config: dict[str, Any] = field(default_factory=dict)  # flags of the schedulers


@dataclass(frozen=True)
class Report:
    """The results. Times are in seconds; processor time is measured on this machine, everything else is simulated."""

    num_replicas: int
    num_schedulers: int
    num_ended: int
    num_failed: int
    num_tokens: int
    num_steps: int
    mean_running: float  # requests in a step
    seconds: float  # simulated, from the first arrival to the last one
    hit_rate: float  # part of prompt tokens that was found in a prefix cache
    load_rate: float  # part of prompt tokens that was loaded from a tier or another executor
    best_hit_rate: float  # if one replica had served all requests and kept all blocks
    utilization: float  # part of the time that devices worked while requests came, on average
    jain: float  # Jain's index of the time that each replica worked: 1 = all the same
    cv: float  # coefficient of variation of it
    cv_running: float  # and of how many requests were in a replica's steps, on average
    num_preemptions: int
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float  # time per output token after the first
    tpot_p99: float
    cores: float  # that all schedulers together keep busy
    max_cores: float  # that the busiest does
    cpu_us: dict[str, dict[str, float]]  # part of the work -> per request, per step, per running request and step
    max_rss_mib: float
    wall_seconds: float


class Fleet:
    """Runs a case. Nothing depends on the machine but what is measured."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.timeline = Timeline()
        self.workload = Workload(case.shape, case.seed)
        self._draw = random.Random(case.seed + 1)
        self._device = DEVICES[case.device].with_blocks(case.num_blocks)
        config = SchedulerConfig(max_waiting_requests=1 << 30, max_queue_time=0, **case.config)
        n = case.num_schedulers
        self.lines = [self._line(config, (case.num_replicas + i) // n) for i in range(n)]
        self._drivers = [(line, driver) for line in self.lines for driver in line.drivers]
        self._front = front(case.front, n)
        self._params: dict[int, SamplingParams] = {}  # by max_tokens
        self._num_submitted = 0
        self._num_wanted_tokens = 0
        self._busy: list[float] = []  # seconds that each replica worked, while requests came
        self._running: list[float] = []  # and those of the requests in its steps
        self._ended: list[tuple[float, float]] = []  # time to first token, time per token
        self._num_failed = 0

    def run(self) -> Report:
        start, cpu_start = time.perf_counter(), time.process_time()
        self._arrivals = self.workload.arrivals(self._rate, self.case.num_requests)
        self._announce_arrival()
        self._plan_executors()
        self.timeline.run()
        wall_seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        self._check()
        return self._report(wall_seconds, cpu_seconds)

    def _line(self, config: SchedulerConfig, num_replicas: int) -> Line:
        case, num_prefill = self.case, round(self.case.prefill * num_replicas)
        # Requests are handed over through the host memory of executors that compute prompts.
        num_stores = num_replicas if case.tier else num_prefill
        kind = KINDS[case.tier or "host"]
        block_bytes = self._device.block_bytes
        stores = [
            Store(kind, block_bytes, int(case.tier_gib * 2**30 * min(case.sharing, num_stores)) // block_bytes)
            for _ in range(-(-num_stores // case.sharing))
        ]
        roles = {number: "prefill" if number < num_prefill else "decode" for number in range(num_replicas)}
        return Line(
            self.timeline,
            config,
            self._device,
            num_replicas,
            stores={number: stores[number // case.sharing] for number in range(num_stores)},
            roles=roles if num_prefill else {},
        )

    @property
    def _rate(self) -> float:
        """Requests per second, of all."""
        return self.case.num_replicas * (self.case.rate or self._device.rate)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _announce_arrival(self) -> None:
        if (next_time := next(self._arrivals, None)) is not None:
            self.timeline.at(next_time, self._arrive)
        else:
            self._seconds = self.timeline.now
            self._busy = [driver.busy_seconds for _, driver in self._drivers]
            self._running = [driver.running_seconds for _, driver in self._drivers]

    def _arrive(self) -> None:
        turn = self.workload.next_turn(self.timeline.now)
        line = self.lines[0]
        if len(self.lines) > 1:
            line = self.lines[self._front(turn.conversation, [len(line.streams) for line in self.lines])]
        self._num_submitted += 1
        self._num_wanted_tokens += turn.max_tokens
        if turn.max_tokens not in self._params:
            params = SamplingParams(max_tokens=turn.max_tokens, ignore_eos=True, seed=1)
            self._params[turn.max_tokens] = resolve(params)
        request = line.meter.time(
            "add", Request, self._num_submitted, turn.conversation.token_ids, self._params[turn.max_tokens]
        )
        line.submit(request, lambda stream: self._end(turn, stream))
        self._announce_arrival()

    def _end(self, turn: Turn, stream: Stream) -> None:
        request = stream.request
        self.workload.ended(turn, request.token_ids, self.timeline.now)
        if stream.first_token is None:
            self._num_failed += 1
            self._num_wanted_tokens -= turn.max_tokens - request.num_output_tokens
            return
        after = max(1, request.num_output_tokens - 1)
        self._ended.append((stream.first_token - stream.arrival, (stream.end - stream.first_token) / after))

    # -- executors ---------------------------------------------------------------------------------------------------

    def _plan_executors(self) -> None:
        case, expected = self.case, self.case.num_requests / self._rate
        num_late = int(case.late * len(self._drivers))
        for line, driver in self._drivers[: len(self._drivers) - num_late]:
            line.attach(driver)
        for line, driver in self._drivers[len(self._drivers) - num_late :]:
            self.timeline.at(expected / 2, line.attach, driver)
        for i in range(case.num_deaths):
            self.timeline.at(expected * (i + 1) / (case.num_deaths + 1), self._kill)

    def _kill(self) -> None:
        """Ends a random executor, which returns with an empty cache."""
        present = [(line, driver) for line, driver in self._drivers if driver.replica.info]
        if present:
            line, driver = self._draw.choice(present)
            line.lose(driver)
            self.timeline.at(self.timeline.now + self.case.down_seconds, line.attach, driver)

    # -- what came of it ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Nothing is lost, and nothing is left."""
        num_ended, num_tokens = len(self._ended) + self._num_failed, sum(line.num_tokens for line in self.lines)
        assert num_ended == self._num_submitted == self.case.num_requests, "a request was lost"
        assert num_tokens == self._num_wanted_tokens, "a token was lost, or is too many"
        for line in self.lines:
            assert not line.streams and not line.scheduler.num_waiting and not line.scheduler.num_running
            if self.case.num_requests * len(self._drivers) <= _MAX_CHECKED:
                check_integrity(line.scheduler)

    def _report(self, wall_seconds: float, cpu_seconds: float) -> Report:
        lines, case, seconds = self.lines, self.case, self._seconds
        # What is measured is time; other processes took a part of it, of everything alike.
        part = min(1.0, cpu_seconds / wall_seconds)
        replicas = [driver.replica for _, driver in self._drivers]
        num_steps, num_scheduled = (sum(line.num_steps for line in lines), sum(line.num_scheduled for line in lines))
        cpu = {name: part * sum(line.meter.seconds.get(name, 0.0) for line in lines) for name in PARTS}
        of_lines = [part * sum(line.meter.seconds.values()) / seconds for line in lines]
        cpu["all"] = sum(cpu.values())
        busy = self._busy
        ttfts, tpots = (sorted(column) for column in zip(*self._ended, strict=True))
        return Report(
            num_replicas=case.num_replicas,
            num_schedulers=case.num_schedulers,
            num_ended=len(self._ended),
            num_failed=self._num_failed,
            num_tokens=sum(line.num_tokens for line in lines),
            num_steps=num_steps,
            mean_running=num_scheduled / num_steps,
            seconds=seconds,
            hit_rate=sum(one.counts.num_prefix_hits for one in replicas)
            / sum(one.counts.num_prefix_queries for one in replicas),
            load_rate=sum(driver.loader.num_loaded_blocks for _, driver in self._drivers)
            * BLOCK_SIZE
            / self.workload.num_prompt_tokens,
            best_hit_rate=self.workload.num_reusable_tokens / self.workload.num_prompt_tokens,
            utilization=sum(busy) / seconds / len(busy),
            jain=sum(busy) ** 2 / (len(busy) * sum(value * value for value in busy)),
            cv=_cv(busy),
            cv_running=_cv(self._running),
            num_preemptions=sum(one.counts.num_preemptions for one in replicas),
            ttft_p50=_quantile(ttfts, 0.5),
            ttft_p99=_quantile(ttfts, 0.99),
            tpot_p50=_quantile(tpots, 0.5),
            tpot_p99=_quantile(tpots, 0.99),
            cores=sum(of_lines),
            max_cores=max(of_lines),
            cpu_us={
                name: {
                    "request": 1e6 * spent / self._num_submitted,
                    "step": 1e6 * spent / num_steps,
                    "running": 1e6 * spent / num_scheduled,
                }
                for name, spent in cpu.items()
            },
            max_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            wall_seconds=wall_seconds,
        )


def _cv(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.fmean(values)


def _quantile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]
