"""The pure core against a simulated clock: requests arrive when they are said to, steps take what they are said to."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pagewire.services.scheduler.admission.admission import Admission, Forecast, WaitTooLong, load_of
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.common_pb2 import SamplingParams
from tests.fakes import FakeExecutor
from tests.services.scheduler.pure_line import PureLine

# Seconds of a step with so many requests and tokens.
StepSeconds = Callable[[int, int], float]


def cpu_step_seconds(num_requests: int, num_tokens: int) -> float:
    """About what SmolLM2-135M takes on two cores."""
    return 0.01 + 0.0006 * num_requests + 0.0005 * (num_tokens - num_requests)


@dataclass
class Arrival:
    """A request on its way: when it comes, its size, and whatever the test wants to know of it."""

    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    timeout: float | None = None
    num_refusals: int = 0
    retry_delay: float | None = None  # of the last refusal
    admitted_at: float | None = None
    forecast: Forecast | None = None
    first_step_at: float | None = None
    first_token_at: float | None = None
    step_at_admission: int = 0
    step_at_first_token: int = 0
    request: Request | None = field(default=None, repr=False)


class Simulation:
    """Admission in front of one scheduler. Refused requests come back after the stated delay, if `retries`."""

    def __init__(
        self,
        *,
        max_wait: float,
        num_rows: int = 16,
        num_blocks: int = 4096,
        step_seconds: StepSeconds = cpu_step_seconds,
        retries: bool = False,
        **config: Any,
    ) -> None:
        executor = FakeExecutor(
            num_blocks=num_blocks, max_num_seqs=num_rows, max_num_batched_tokens=512, check_kv=False
        )
        self.line = PureLine(executor, enable_prefix_caching=False, check=False, **config)
        self.admission = Admission(self.line.scheduler.output_lengths)
        self.max_wait = max_wait
        self.now = 0.0
        self.num_steps = 0
        self._step_seconds = step_seconds
        self._retries = retries
        self._tie = itertools.count()
        self._prompts = itertools.count()
        self._coming: list[tuple[float, int, Arrival]] = []
        self._live: dict[int, Arrival] = {}

    def run(self, arrivals: Iterable[Arrival], until: float = 1e9) -> None:
        """Runs until then, or until no request is left."""
        for arrival in arrivals:
            self._come(arrival.time, arrival)
        while self.now < until and (self._coming or self._live):
            while self._coming and self._coming[0][0] <= self.now:
                self._arrive(heapq.heappop(self._coming)[2])
            if self.line.schedule() is None:
                if not self._coming:
                    return
                self.now = self._coming[0][0]
            else:
                self._execute()

    def _come(self, time: float, arrival: Arrival) -> None:
        heapq.heappush(self._coming, (time, next(self._tie), arrival))

    def _arrive(self, arrival: Arrival) -> None:
        prompt = [next(self._prompts) % 1000] * arrival.num_prompt_tokens
        newcomer = Request(0, prompt, SamplingParams())
        forecast = self.admission.forecast(load_of(self.line.scheduler, newcomer))
        try:
            self.admission.check(forecast, self.max_wait, arrival.timeout, self.now)
        except WaitTooLong as refusal:
            arrival.num_refusals += 1
            arrival.retry_delay = refusal.retry_delay
            if self._retries:
                self._come(self.now + refusal.retry_delay, arrival)
            return
        arrival.admitted_at, arrival.forecast, arrival.step_at_admission = self.now, forecast, self.num_steps
        arrival.request = self.line.add(prompt, max_tokens=arrival.num_output_tokens, ignore_eos=True)
        self._live[arrival.request.request_id] = arrival

    def _execute(self) -> None:
        step = self.line.steps[-1]
        for request in step.admitted:
            arrival = self._live[request.request_id]
            if arrival.first_step_at is None:
                arrival.first_step_at = self.now
                assert arrival.admitted_at is not None and arrival.forecast is not None
                self.admission.on_first_step(
                    request.num_prompt_tokens,
                    request.num_cached_tokens or 0,
                    arrival.forecast,
                    self.now - arrival.admitted_at,
                )
        num_requests, num_tokens = len(step.request_ids), sum(step.num_scheduled_tokens)
        seconds = self._step_seconds(num_requests, num_tokens) if num_requests else 0.0
        self.now += seconds
        self.num_steps += 1
        outputs = self.line.receive(seconds=seconds)
        for request in outputs.requests:
            arrival = self._live[request.request_id]
            if arrival.first_token_at is None:
                arrival.first_token_at, arrival.step_at_first_token = self.now, self.num_steps
            if request.is_finished:
                del self._live[request.request_id]
