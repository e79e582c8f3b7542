"""The pure core before a pipeline of stages, in simulated time: what each stage is at, and for what it waits."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pagewire.services.scheduler.values.step import ScheduledStep, StepWork
from tests.fakes import FakeExecutor
from tests.services.scheduler.pure_line import PureLine

LATENCY = 0.0005  # of a message between scheduler and executor, seconds


class Pipeline:
    """One scheduler, driven as `ReplicaDriver` does, and stages that take what a formula says. A stage begins a step
    when the one before it is done with it, the first one when it has the step and the last tokens of its requests."""

    def __init__(self, num_stages: int, stage_seconds: Callable[[StepWork], float], **config: Any) -> None:
        executor = FakeExecutor(num_blocks=4096, pipeline_stages=num_stages, check_kv=False)
        self.line = PureLine(executor, check=False, enable_prefix_caching=False, **config)
        self.now = 0.0
        self.busy = [0.0] * num_stages  # seconds that each stage has worked
        self.steps: list[ScheduledStep] = []
        self.step_ends: list[float] = []
        self._seconds = stage_seconds
        self._free_at = [0.0] * num_stages
        self._sampled_at: dict[int, float] = {}  # when a request's last token was, or will be
        self._results: deque[tuple[float, float, float]] = deque()  # when each arrives, seconds of a stage, idle ones

    def run(self, until: float = float("inf")) -> None:
        """Runs until no request is left, or for so long."""
        pacer = self.line.replica.pacer
        while self.now < until:
            hold = pacer.hold(self.now)
            if not hold and (step := self.line.schedule()) is not None:
                pacer.on_sent(self.line.replica.expected_seconds(step), self.now)
                self._execute(step)
                continue
            if not self._results:
                return
            if hold and self.now + hold < self._results[0][0]:
                self.now += hold
                continue
            self.now, seconds, idle = self._results.popleft()
            self.line.receive(seconds=pacer.seconds_of_oldest(self.now))
            pacer.on_result(seconds, idle, self.now)

    def _execute(self, step: ScheduledStep) -> None:
        seconds = self._seconds(step.work)
        arrived = self.now + LATENCY
        tokens = max((self._sampled_at.get(request_id, 0.0) for request_id in step.request_ids), default=0.0)
        idle = max(0.0, arrived - self._free_at[0])
        ready = max(arrived, tokens)
        for stage, free_at in enumerate(self._free_at):
            ready = self._free_at[stage] = max(ready, free_at) + seconds
            self.busy[stage] += seconds
        self._sampled_at |= {request.request_id: ready for request in step.sampled}
        self._results.append((ready + LATENCY, seconds, idle))
        self.steps.append(step)
        self.step_ends.append(ready)

    def idle_shares(self, run: Callable[[], None]) -> Sequence[float]:
        """Returns the share of time in which each stage has nothing to do."""
        start, before = self.now, list(self.busy)
        run()
        passed = self.now - start
        return [1 - (now - then) / passed for now, then in zip(self.busy, before, strict=True)]
