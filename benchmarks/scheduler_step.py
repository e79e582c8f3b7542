"""Measures the scheduler's time per decode step: `python -m benchmarks.scheduler_step [--json-out FILE]`.

For each number of running requests: schedule() and update() of the pure core, conversion to and from the wire, and the
outputs for one tokenizer, in microseconds of CPU time per step and per request, without an executor.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, TypeVar

from benchmarks.curves.output import CurveOutput
from pagewire.config import SchedulerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.services.scheduler.compose import make_scheduler
from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.request_output import RequestOutput
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, KVGroup
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult
from pagewire.tools.bench.curves import Point
from pagewire.v1 import common_pb2, executor_pb2

T = TypeVar("T")

BATCH_SIZES = (16, 64, 256, 1024, 4096)
NUM_STEPS = 200
PROMPT_TOKENS = 64
BLOCK_SIZE = 16


class Clock:
    """Adds up the CPU time of calls by name; other load on the machine does not count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, call: Callable[..., T], *args: Any) -> T:
        start = time.thread_time()
        result = call(*args)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start
        return result


def running_scheduler(num_requests: int) -> Scheduler:
    """Returns a scheduler with requests that have all been prefilled."""
    blocks_per_request = -(-(PROMPT_TOKENS + NUM_STEPS + 8) // BLOCK_SIZE)
    scheduler = make_scheduler(SchedulerConfig(pipeline_depth=2))
    scheduler.attach(
        scheduler.replicas[0],
        ExecutorInfo(
            incarnation=1,
            model="none",
            max_model_len=8192,
            vocab_size=50_000,
            eos_token_ids=frozenset([0]),
            max_logprobs=0,
            kv_groups=(KVGroup(num_requests * blocks_per_request + 64),),
            block_size=BLOCK_SIZE,
            max_num_seqs=num_requests,
            max_num_batched_tokens=num_requests * PROMPT_TOKENS,
        ),
    )
    for i in range(num_requests):
        prompt = [1 + (i * 7919 + j) % 40_000 for j in range(PROMPT_TOKENS)]
        scheduler.add_request(Request(i, prompt, resolve(common_pb2.SamplingParams(seed=i))))
    step = scheduler.schedule(scheduler.replicas[0])
    assert step is not None and len(step.sampled) == num_requests
    scheduler.update(scheduler.replicas[0], result_of(step))
    return scheduler


def result_of(step: ScheduledStep) -> StepResult:
    n = len(step.sampled)
    return StepResult(step.step_id, [request.request_id for request in step.sampled], [1] * n, [5] * n)


def wire_result_of(step: ScheduledStep) -> executor_pb2.StepResult:
    result = result_of(step)
    return executor_pb2.StepResult(
        step_id=result.step_id,
        request_ids=result.request_ids,
        num_tokens=result.num_tokens,
        token_ids=result.token_ids,
    )


def step_to_wire(step: ScheduledStep) -> bytes:
    return convert.from_step(step).SerializeToString()


def output_message(outputs: Outputs) -> bytes:
    request_outputs = {
        request.request_id: RequestOutput([token_id], request.num_prompt_tokens, request.num_output_tokens, 0)
        for request, token_id in zip(outputs.requests, outputs.token_ids, strict=True)
    }
    return convert.from_outputs(request_outputs).SerializeToString()


def measure(num_requests: int) -> dict[str, float]:
    """Microseconds per step by part."""
    scheduler, clock = running_scheduler(num_requests), Clock()
    (replica,) = scheduler.replicas
    for _ in range(NUM_STEPS):
        step = clock.time("schedule", scheduler.schedule, replica)
        assert step is not None
        clock.time("step to wire", step_to_wire, step)
        message = wire_result_of(step)
        result = clock.time("result from wire", convert.to_step_result, message)
        outputs = clock.time("update", scheduler.update, replica, result)
        clock.time("outputs", output_message, outputs)
    return {name: seconds / NUM_STEPS * 1e6 for name, seconds in clock.seconds.items()}


def main() -> None:
    output = CurveOutput(argparse.ArgumentParser(description=__doc__.partition("\n")[0]), "Pagewire")
    parts = ("schedule", "update", "step to wire", "result from wire", "outputs")
    print(f"{'running':>8}" + "".join(f"{part:>18}" for part in parts) + f"{'us/request':>14}")
    points: list[Point] = []
    for num_requests in BATCH_SIZES:
        microseconds = measure(num_requests)
        per_request = sum(microseconds.values()) / num_requests
        columns = "".join(f"{microseconds[part]:>18.1f}" for part in parts)
        print(f"{num_requests:>8}{columns}{per_request:>14.2f}", flush=True)
        points.append({"running_requests": num_requests, "us_per_request": per_request, "us_per_step": microseconds})
        output.put("running-requests", "no model", points)


if __name__ == "__main__":
    main()
