"""An executor without a model: `python -m benchmarks.front_end.executor ADDRESS STEP_MS`.

It is the real service around a runner that sleeps for STEP_MS in each step and samples one token for every request.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.device.results import PendingResults
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.service.seams import Features
from pagewire.services.executor.service.servicer import ExecutorServicer
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.services.executor.tiers.served import NoTiers
from pagewire.v1 import executor_pb2, executor_pb2_grpc
from pagewire.wire import rpc

TOKEN_ID = 504  # " is" in the vocabulary of the default model
INFO = ExecutorInfo(
    incarnation=time.time_ns(),
    model="scripted",
    max_model_len=4096,
    vocab_size=49152,
    eos_token_ids=(0,),
    kv_groups=(KVGroup(8192, 0),),
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    device="cpu",
    dtype="none",
    weight_bytes=0,
    kv_cache_bytes=0,
)


class ScriptedRunner:
    """The part of a Runner that steps need."""

    smallest_image = 0

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._missing: dict[int, int] = {}  # tokens of each request that are not computed yet

    @property
    def num_requests(self) -> int:
        return len(self._missing)

    def reset(self) -> None:
        self._missing.clear()

    def record_missing(self) -> bool:
        return False

    def execute(self, step: Step, launching: Callable[[float], None]) -> StepOutput:
        launching(len(step.request_ids))
        for request_id in step.finished_request_ids:
            self._missing.pop(request_id, None)
        for new in step.new_requests:
            self._missing[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        sampled = []
        for request_id, num_tokens in zip(step.request_ids, step.num_scheduled_tokens.tolist(), strict=True):
            self._missing[request_id] = max(0, self._missing[request_id] - num_tokens)
            if not self._missing[request_id]:
                sampled.append(request_id)
        time.sleep(self._step_s)
        tokens: dict[str, Any] = {"token_ids": torch.full((len(sampled),), TOKEN_ID)} if sampled else {}
        pending = PendingResults(tokens)
        return StepOutput(step.step_id, sampled, [], int(step.num_scheduled_tokens.sum()), pending, vocab_size=49152)


def start(step_s: float) -> tuple[Any, ExecutorInfo]:
    # The name by which the measurement finds this thread.
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("device")
    return ScriptedRunner(step_s), INFO


class Feature:
    """Grammars, weights, adapters and sleep, of which there is nothing to say."""

    state = executor_pb2.SleepState()

    def check(self) -> None: ...

    async def attach(self, step: Step) -> Step:
        return step

    async def in_force(self) -> executor_pb2.Weights:
        return executor_pb2.Weights(version="1", model="scripted")

    async def describe(self) -> executor_pb2.DescribeResponse:
        return executor_pb2.DescribeResponse()


async def serve(address: str, step_s: float) -> None:
    worker = Worker(lambda: start(step_s), on_cuda=False)
    server = rpc.Server([address], shutdown_timeout=0.1)
    feature: Any = Feature()
    servicer = ExecutorServicer(worker, lambda info: Features(feature, feature, feature, NoTiers(), feature))
    name = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
    server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, name)
    await server.start()
    worker.start()
    await asyncio.wrap_future(worker.loaded)
    await server.set_serving(True)
    await rpc.wait_for_signal()
    await server.stop()


if __name__ == "__main__":
    rpc.run(serve(sys.argv[1], float(sys.argv[2]) / 1000))
