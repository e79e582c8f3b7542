"""Measures the services around the executor: `python -m benchmarks.services [--streams 1,32,64] [FLAGS OF serve]`.

For each number of streams, in microseconds of processor time per output token: each process of `pagewire serve` under
that load, with the executor divided into "compute" and "gRPC", its other threads; and "alone", the same steps in this
process without any service. "around" is everything except compute, relative to compute. Processor time depends little
on other load of the machine, unlike "rate", output tokens per second through HTTP, and "its own", that of the steps
alone.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from benchmarks.serving import drive, server
from pagewire import flags
from pagewire.config import ExecutorConfig, SchedulerConfig, ServeConfig
from pagewire.config.fields import POSITIVE, flag
from pagewire.config.sampling_checks import resolve
from pagewire.files.models import resolve_model
from pagewire.process.process import usable_cores
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service import convert as executor_convert
from pagewire.services.executor.start.startup import start_runner
from pagewire.services.executor.step.step import Step
from pagewire.services.scheduler.compose import make_scheduler
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import StepResult
from pagewire.v1.common_pb2 import SamplingParams

SERVICES = ("gateway", "tokenizer", "scheduler", "executor")
AROUND = ("gateway", "tokenizer", "scheduler", "gRPC")


@dataclass(frozen=True, kw_only=True)
class ServicesConfig(ServeConfig):
    """The stack, and the load."""

    streams: tuple[int, ...] = flag((1, 32, 64), "requests in flight", group="load", valid=POSITIVE)
    rounds: int = flag(2, "requests of each stream", group="load", valid=POSITIVE)
    input_len: int = flag(128, "tokens of each prompt", group="load", valid=POSITIVE)
    output_len: int = flag(128, "tokens generated for each prompt", group="load", valid=POSITIVE)


@dataclass(frozen=True)
class Run:
    """The cost of a load: processor seconds by part, and seconds of the clock."""

    num_tokens: int
    wall: float
    processor: dict[str, float]

    def per_token(self, *parts: str) -> float:
        """Microseconds of processor time"""
        return 1e6 * sum(self.processor[part] for part in parts) / self.num_tokens

    @property
    def rate(self) -> float:
        """Output tokens per second"""
        return self.num_tokens / self.wall


def main() -> None:
    config = without_drafts(
        flags.parse(
            ServicesConfig, sys.argv[1:], prog="python -m benchmarks.services", description="What the services cost."
        )
    )
    # A line for each request would be most of what is printed.
    with server(replace(config, log_level="warning")) as (process, port):
        url = f"http://127.0.0.1:{port}"
        drive(url, num_requests=1, concurrency=1, input_len=config.input_len, output_len=2)
        served = [measure_server(config, process, url, num_streams) for num_streams in config.streams]
    runner, info = start_alone(config)
    alone = [measure_alone(config, runner, info, num_streams) for num_streams in config.streams]
    columns = (*AROUND, "compute", "around", "alone", "client", "rate", "its own")
    print(f"{'streams':>8}" + "".join(f"{name:>10}" for name in columns))
    for num_streams, run, bare in zip(config.streams, served, alone, strict=True):
        parts = "".join(f"{run.per_token(part):>10.1f}" for part in (*AROUND, "compute"))
        share = run.per_token(*AROUND) / run.per_token("compute")
        times = f"{bare.per_token('compute'):>10.1f}{run.per_token('client'):>10.1f}"
        print(f"{num_streams:>8}{parts}{share:>10.1%}{times}{run.rate:>10.0f}{bare.rate:>10.0f}")


def without_drafts(config: ServicesConfig) -> ServicesConfig:
    """Returns the config without speculation: steps alone cannot tell which drafts the model would have accepted."""
    return replace(config, spec_method="none")


# -- through HTTP ------------------------------------------------------------------------------------------------------


def measure_server(config: ServicesConfig, process: psutil.Process, url: str, num_streams: int) -> Run:
    num_threads = config.num_threads or usable_cores()
    before = {name: _thread_times(process, name) for name in SERVICES}
    summary = drive(
        url,
        num_requests=num_streams * config.rounds,
        concurrency=num_streams,
        input_len=config.input_len,
        output_len=config.output_len,
    )
    spent = {
        name: [seconds - before[name].get(thread, 0.0) for thread, seconds in _thread_times(process, name).items()]
        for name in SERVICES
    }
    executor = sorted(spent.pop("executor"), reverse=True)
    processor = {name: sum(times) for name, times in spent.items()}
    processor |= {"compute": sum(executor[:num_threads]), "gRPC": sum(executor[num_threads:])}
    return Run(summary["output_tokens"], summary["wall_s"], processor | {"client": summary["client_cpu_s"]})


def _thread_times(root: psutil.Process, service: str) -> dict[int, float]:
    """Processor seconds of each thread of a service"""
    process = next(child for child in root.children() if ["pagewire.cli", service] == child.cmdline()[3:5])
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


# -- alone -------------------------------------------------------------------------------------------------------------


def start_alone(config: ServicesConfig) -> tuple[ModelRunner, ExecutorInfo]:
    executor = config.part(ExecutorConfig, model=str(resolve_model(config.model)))
    runner, info = start_runner(executor, executor.model, lambda fraction, text: None)
    return runner, convert.to_executor_info(
        executor_convert.describe_response(info, executor_convert.first_weights(info))
    )


def measure_alone(config: ServicesConfig, runner: ModelRunner, info: ExecutorInfo, num_streams: int) -> Run:
    """The steps that a scheduler decides on for the same load, one after the other."""
    plans = [plan(config, info, num_streams, turn * num_streams) for turn in range(config.rounds)]
    start, processor_start = time.perf_counter(), time.process_time()
    for steps in plans:
        runner.reset()
        for step in steps:
            runner.execute(step).wait()
    wall, processor = time.perf_counter() - start, time.process_time() - processor_start
    return Run(num_streams * config.rounds * config.output_len, wall, {"compute": processor})


def plan(config: ServicesConfig, info: ExecutorInfo, num_streams: int, first_id: int) -> Sequence[Step]:
    """Steps of requests that all come at once, as the executor gets them."""
    scheduler = make_scheduler(config.part(SchedulerConfig))
    (replica,) = scheduler.replicas
    scheduler.attach(replica, info)
    params = resolve(SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=config.output_len, seed=0))
    for number in range(first_id, first_id + num_streams):
        prompt = [(number * 7919 + position * 104729) % info.vocab_size for position in range(config.input_len)]
        scheduler.add_request(Request(number, prompt, params))
    steps = []
    while (step := scheduler.schedule(replica)) is not None:
        steps.append(executor_convert.step_from_proto(convert.from_step(step)))
        ids = [request.request_id for request in step.sampled]
        scheduler.update(replica, StepResult(step.step_id, ids, [1] * len(ids), [1] * len(ids)))
    return steps


if __name__ == "__main__":
    main()
