"""One scheduler and its replicas in simulated time.

The scheduler, its pacers, forecasts, metrics and messages are the real ones. What `Engine` and `ReplicaDriver` do on an
event loop is done here on a timeline, in the same order, and executors are formulas.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

from benchmarks.fleet.devices import Device
from benchmarks.fleet.tiers import Loader, Store, StoreCalls, split
from benchmarks.fleet.timeline import Timeline
from benchmarks.scheduler_step import output_message, result_of, step_to_wire, wire_result_of
from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.admission.admission import NOTHING_KNOWN, Admission, load_of
from pagewire.services.scheduler.compose import make_scheduler
from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.wakes import Wakes
from pagewire.services.scheduler.observed.stats import Stats
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.tiers.tiers import Tiers
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep

T = TypeVar("T")

_WIRE_EVERY = 16  # steps, of which one is turned into messages, to know what that costs
_contexts = attrgetter("num_computed_tokens")


class Meter:
    """Seconds by name, those included in which something else had the core. Asking for processor time instead is a call
    of the system, which may take longer than a decision."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, call: Callable[..., T], *args: Any, times: int = 1) -> T:
        """Adds the processor time of a call; `times` is the number of calls that it stands for."""
        start = time.perf_counter()
        result = call(*args)
        self.seconds[name] = self.seconds.get(name, 0.0) + (time.perf_counter() - start) * times
        return result


@dataclass(slots=True)
class Stream:
    """A live request, and when things happened to it, seconds."""

    request: Request
    arrival: float
    on_end: Callable[["Stream"], None]
    first_step: float | None = None
    first_token: float | None = None
    end: float = 0.0


@dataclass
class Line:
    """A scheduler with so many replicas, of which some may have no executor yet."""

    timeline: Timeline
    config: SchedulerConfig
    device: Device
    num_replicas: int
    num_steps: int = 0
    num_scheduled: int = 0  # requests, summed over steps
    num_tokens: int = 0
    num_failed: int = 0
    stores: Mapping[int, Store] = field(default_factory=dict)  # tiers, by replica id
    roles: Mapping[int, str] = field(default_factory=dict)  # by replica id; others do both
    meter: Meter = field(default_factory=Meter)
    streams: dict[int, Stream] = field(default_factory=dict)  # those that are live, by request id

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.config, self.num_replicas, tiers=Tiers(self._calls_to))
        self._wakes = Wakes(self.scheduler)
        self._stats = Stats(self.scheduler)
        self._admission = Admission(self.scheduler.output_lengths)
        self.drivers = [Driver(self, replica) for replica in self.scheduler.replicas]
        self._by_replica = {driver.replica: driver for driver in self.drivers}
        self.sources = {driver.replica.name: store for driver in self.drivers if (store := driver.store) is not None}

    def _calls_to(self, replica_id: int) -> StoreCalls | None:
        store = self.stores.get(replica_id)
        return None if store is None else StoreCalls(store)

    # -- clients -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, on_end: Callable[[Stream], None]) -> None:
        self.streams[request.request_id] = Stream(request, self.timeline.now, on_end)
        self.meter.time("forecast", self._forecast, request)
        is_live = self.meter.time("add", self.scheduler.add_request, request)
        assert is_live, "it brings no tokens along"
        self._wake(self._wakes.after_arrival, request)

    def _forecast(self, request: Request) -> None:
        self._admission.forecast(load_of(self.scheduler, request))

    # -- executors ---------------------------------------------------------------------------------------------------

    def _wake_all(self) -> None:
        for driver in self.drivers:
            driver.wake()

    def _wake(self, whom: Callable[..., Iterable[Replica]], *args: Any) -> None:
        for replica in self.meter.time("wakes", whom, *args):
            self._by_replica[replica].wake()

    def attach(self, driver: "Driver") -> None:
        driver.start_over()
        ended = self.scheduler.attach(driver.replica, driver.info())
        assert not ended, "all executors are alike"
        self._wake_all()

    def lose(self, driver: "Driver") -> None:
        """Ends the stream of its executor without a message."""
        driver.start_over()
        for request in self.scheduler.detach(driver.replica, Loss.SILENT):
            self.num_failed += 1
            self._end(request)
        self._wake_all()

    def on_decision(self, driver: "Driver", step: ScheduledStep | None) -> None:
        self._wake(self._wakes.after_decision, driver.replica, step)

    def on_step(self, driver: "Driver", step: ScheduledStep) -> None:
        self.num_steps += 1
        self.num_scheduled += len(step.request_ids)
        if self.num_steps % _WIRE_EVERY == 0:
            self.meter.time("messages", step_to_wire, step, times=_WIRE_EVERY)
            result = wire_result_of(step)
            self.meter.time("messages", convert.to_step_result, result, times=_WIRE_EVERY)
        self.meter.time("metrics", self._stats.on_step, driver.replica, sum(step.num_scheduled_tokens), 0.0)
        for request in step.admitted:
            stream = self.streams[request.request_id]
            if stream.first_step is None:
                stream.first_step = self.timeline.now
                waited = stream.first_step - stream.arrival
                self._admission.on_first_step(
                    request.num_prompt_tokens, request.num_cached_tokens or 0, NOTHING_KNOWN, waited
                )

    def on_result(self, driver: "Driver", outputs: Outputs) -> None:
        self._wake(self._wakes.after_result, driver.replica)
        self.num_tokens += len(outputs.token_ids)
        if self.num_steps % _WIRE_EVERY == 0:
            self.meter.time("messages", output_message, outputs, times=_WIRE_EVERY)
        for request, _ in outputs.ends:
            self._end(request)

    def _end(self, request: Request) -> None:
        stream = self.streams.pop(request.request_id)
        stream.end = self.timeline.now
        stream.on_end(stream)


class Driver:
    """One replica at work, as `ReplicaDriver` has it, and its device, which runs one step after another."""

    def __init__(self, line: Line, replica: Replica) -> None:
        self.replica = replica
        self.incarnation = 0
        self.busy_seconds = 0.0
        self.running_seconds = 0.0  # of requests: each step's time as often as requests were in it
        self._line = line
        self._timeline = line.timeline
        self._is_awake = False
        self._timer = 0  # number of the one that counts
        self._device_free: float | None = None  # from when on; None: it has not run yet
        self._beginning: list[Request] = []  # those that have no first token yet
        self.store = line.stores.get(replica.replica_id)
        self._loader: Loader | None = None

    def info(self) -> ExecutorInfo:
        number = self.replica.replica_id
        tiers = () if self.store is None else (self.store.description(f"store {id(self.store)}"),)
        return self._line.device.info(self.incarnation, self._line.roles.get(number, "both"), tiers)

    @property
    def loader(self) -> Loader:
        """Loads and saves of this executor."""
        if self._loader is None:
            block_bytes, sources = self._line.device.block_bytes, self._line.sources
            self._loader = Loader(self._timeline, self.replica, block_bytes, self.store, sources, self.wake)
        return self._loader

    def start_over(self) -> None:
        self.incarnation += 1
        self._device_free = None
        self._beginning = []

    def wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._timeline.soon(self._send_steps)

    def _send_steps(self) -> None:
        self._is_awake = False
        line, pacer = self._line, self.replica.pacer
        while True:
            self._timer += 1
            if seconds := line.meter.time("pacing", pacer.hold, self._timeline.now):
                self._timeline.at(self._timeline.now + seconds, self._on_timer, self._timer)
                return
            step = line.meter.time("schedule", line.scheduler.schedule, self.replica)
            line.on_decision(self, step)
            if step is None:
                return
            pacer.on_sent(self.replica.expected_seconds(step), self._timeline.now)
            line.on_step(self, step)
            self._execute(step)

    def _on_timer(self, timer: int) -> None:
        if timer == self._timer:
            self.wake()

    def _execute(self, step: ScheduledStep) -> None:
        device, now = self._line.device, self._timeline.now
        arrival = now + device.latency
        start = arrival if self._device_free is None else max(arrival, self._device_free)
        idle = None if self._device_free is None else start - self._device_free
        seconds = 0.0
        if step.request_ids:
            seconds = device.step_seconds(step.work, sum(map(_contexts, self.replica.running)))
        self.busy_seconds += seconds
        self.running_seconds += seconds * len(step.request_ids)
        self._device_free = start + seconds
        self._beginning += step.admitted
        if step.tiers is not None:
            incarnation = self.incarnation
            for load in step.tiers.loads:
                self.loader.begin(load, start, lambda: incarnation == self.incarnation)
        self._timeline.at(start + seconds + device.latency, self._on_result, self.incarnation, step, seconds, idle)

    def _on_result(self, incarnation: int, step: ScheduledStep, seconds: float, idle: float | None) -> None:
        if incarnation != self.incarnation:
            return
        if step.tiers is not None:
            self.loader.save(one for blocks in step.tiers.saves for one in split(blocks.hashes))
        line, now, pacer = self._line, self._timeline.now, self.replica.pacer
        took = pacer.seconds_of_oldest(now)
        outputs = line.meter.time("update", line.scheduler.update, self.replica, result_of(step), took)
        if self._beginning:
            self._beginning = self._note_first_tokens(self._beginning)
        line.on_result(self, outputs)
        pacer.on_result(seconds, idle, now)

    def _note_first_tokens(self, beginning: Sequence[Request]) -> list[Request]:
        """Returns those that have none yet."""
        rest = []
        for request in beginning:
            stream = self._line.streams.get(request.request_id)
            if stream is None or stream.first_token is not None:
                continue
            if request.num_output_tokens:
                stream.first_token = self._timeline.now
            elif request.replica_id == self.replica.replica_id:
                rest.append(request)
        return rest
