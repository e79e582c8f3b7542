"""Scheduling against a simulated clock: the scheduler decides, and a formula in the place of an executor says how long
each step takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire.config import SchedulerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.services.scheduler.compose import make_scheduler
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, KVGroup
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import StepResult, StepWork
from pagewire.services.scheduler.values.tenant import Tenant
from pagewire.v1.common_pb2 import SamplingParams

# Everything that is new: whole steps of prompts, in the order of arrival.
BEFORE: dict[str, Any] = {
    "target_itl_ms": 0,
    "max_num_partial_prefills": 1 << 30,
    "max_long_partial_prefills": 1 << 30,
}


def cpu_seconds(work: StepWork) -> float:
    """Returns the seconds of a step of SmolLM2-135M on two cores of an AMD EPYC (Zen 5), as measured."""
    if not work.num_prompt_tokens:
        return 0.0045 + 0.0011 * work.num_decodes
    num_tokens = work.num_decodes + work.num_prompt_tokens
    multiple = 8 if num_tokens <= 64 else 16 if num_tokens <= 256 else 32  # what the executor pads steps to
    padded = -(-num_tokens // multiple) * multiple
    return 0.0095 + 0.0011 * work.num_decodes + 0.00042 * padded + 9e-8 * work.num_pairs


@dataclass
class Stream:
    """A request, and when it got its tokens, seconds."""

    arrival: float
    request: Request
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    def rate(self, start: float, end: float) -> float:
        """Tokens per second in between."""
        return sum(start <= time < end for time in self.times) / (end - start)


class Simulation:
    """A scheduler and a device with a formula for its speed."""

    def __init__(
        self,
        max_num_seqs: int = 128,
        num_blocks: int = 8192,
        step_seconds: Callable[[StepWork], float] = cpu_seconds,
        **config: Any,
    ) -> None:
        self.scheduler = make_scheduler(SchedulerConfig(pipeline_depth=1, enable_prefix_caching=False, **config))
        info = ExecutorInfo(
            incarnation=1,
            model="none",
            max_model_len=8192,
            vocab_size=50_000,
            eos_token_ids=frozenset(),
            max_logprobs=0,
            kv_groups=(KVGroup(num_blocks),),
            block_size=16,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
        )
        (self._replica,) = self.scheduler.replicas
        self.scheduler.attach(self._replica, info)
        self._step_seconds = step_seconds
        self.now = 0.0
        self.steps: list[tuple[StepWork, float]] = []  # what each computed, and its seconds
        self.streams: list[Stream] = []
        self._to_come: list[Stream] = []

    def add(
        self, arrival: float, num_prompt_tokens: int, max_tokens: int, tenant: str = "", weight: float = 1
    ) -> Stream:
        params = resolve(SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1))
        prompt = [1 + i % 1000 for i in range(num_prompt_tokens)]
        request = Request(len(self.streams) + 1, prompt, params, tenant=Tenant(tenant, weight))
        stream = Stream(arrival, request)
        self.streams.append(stream)
        self._to_come = sorted([*self._to_come, stream], key=lambda stream: stream.arrival)
        return stream

    def run(self, until: float = float("inf")) -> None:
        """Runs until all requests have ended, or until this time."""
        while self.now < until:
            while self._to_come and self._to_come[0].arrival <= self.now:
                self.scheduler.add_request(self._to_come.pop(0).request)
            step = self.scheduler.schedule(self._replica)
            if step is None:
                if not self._to_come:
                    return
                self.now = self._to_come[0].arrival
                continue
            seconds = self._step_seconds(step.work) if step.request_ids else 0.0
            self.now += seconds
            self.steps.append((step.work, seconds))
            ids = [request.request_id for request in step.sampled]
            result = StepResult(step.step_id, ids, [1] * len(ids), [5] * len(ids))
            for request in self.scheduler.update(self._replica, result, seconds).requests:
                self.streams[request.request_id - 1].times.append(self.now)


def warm(simulation: Simulation) -> float:
    """Lets it learn what steps cost; returns when the load may begin."""
    for i in range(4):
        simulation.add(i * 0.5, 300, 20)
    simulation.run()
    return simulation.now + 1


@dataclass
class Flood:
    """The times of a stream and a chat beside long prompts."""

    ttft: float  # seconds
    ttft_alone: float
    rate: float  # tokens per second of the stream, while the flood was computed
    rate_alone: float
    seconds: float  # until all is done


def flood(tenants: Sequence[str], **config: Any) -> Flood:
    """A stream runs, then 12 prompts of 4,000 tokens come, half a second later a chat. tenants: of the flood, and of
    the stream and the chat."""
    seconds: list[Flood] = []
    ttft_alone = rate_alone = 0.0
    for num_long in (0, 12):
        simulation = Simulation(**config)
        start = warm(simulation)
        stream = simulation.add(start, 50, 1500, tenants[1])
        long = [simulation.add(start + 1, 4000, 16, tenants[0]) for _ in range(num_long)]
        chat = simulation.add(start + 1.5, 60, 16, tenants[1])
        simulation.run()
        end = long[-1].times[0] if long else start + 3
        if not long:
            ttft_alone, rate_alone = chat.ttft, stream.rate(start + 1, end)
            continue
        end = min(end, stream.times[-1])
        seconds.append(Flood(chat.ttft, ttft_alone, stream.rate(start + 1, end), rate_alone, simulation.now - start))
    return seconds[0]


def report() -> None:
    """Prints what a flood does, with what limits prompts off and on."""
    print(f"{'':34}{'ttft s':>9}{'alone':>8}{'tokens/s':>10}{'alone':>8}{'all done s':>12}")
    for name, tenants, config in (
        ("before", ("", ""), BEFORE),
        ("one tenant", ("", ""), {}),
        ("two tenants", ("a", "b"), {}),
    ):
        f = flood(tenants, **config)
        print(f"{name:34}{f.ttft:9.3f}{f.ttft_alone:8.3f}{f.rate:10.1f}{f.rate_alone:8.1f}{f.seconds:12.2f}")
