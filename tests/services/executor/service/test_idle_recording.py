"""The device thread records steps on a CPU while no request has a row, and only then."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.service.idle_recording import IdleRecording
from pagewire.services.executor.service.session import Session
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Blocks, NewRequest, Step
from pagewire.v1 import executor_pb2
from tests.services.executor.helpers.stepping import BLOCK_SIZE, CPU, GREEDY, alone, graph_steps, prompt, tiny_llama
from tests.services.executor.service.test_servicer import INFO

if cpu_backend() != "cpp":
    pytest.skip("there is no C++ compiler: steps are not recorded", allow_module_level=True)

from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96, block_size=BLOCK_SIZE)
NUM_SHAPES = 4 + 3  # of 1 to 4 requests; of 8, 16 and 24 tokens


class Steps(RecordedSteps):
    """Counts the recordings."""

    def __init__(self) -> None:
        super().__init__(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)
        self.num_idle = 0
        self.all_are_recorded = threading.Event()

    def missing(self) -> BatchShape | None:
        self.num_idle += 1
        shape = super().missing()
        if shape is None:
            self.all_are_recorded.set()
        return shape


@dataclass
class Executor:
    worker: Worker
    steps: Steps
    session: Session = field(init=False)
    results: queue.SimpleQueue[executor_pb2.StepResult] = field(default_factory=queue.SimpleQueue)
    num_steps: int = 0

    def __post_init__(self) -> None:
        def deliver(result: executor_pb2.StepResult | Exception | None) -> None:
            assert isinstance(result, executor_pb2.StepResult)
            self.results.put(result)

        self.session = self.worker.open(deliver)

    def step(self, scheduled: dict[int, int], finished: Sequence[int] = ()) -> list[int]:
        """Tokens, in the order of requests. New ones have the prompt of their id, of 5 tokens."""
        self.num_steps += 1
        new = [request_id for request_id, length in scheduled.items() if length > 1]
        self.worker.submit(
            self.session,
            Step(
                step_id=self.num_steps,
                request_ids=list(scheduled),
                num_scheduled_tokens=np.array(list(scheduled.values()), dtype=np.int64),
                num_new_blocks=np.zeros((len(scheduled), 1), dtype=np.int64),
                new_block_ids=np.empty(0, dtype=np.int32),
                finished_request_ids=list(finished),
                new_requests=[
                    NewRequest(
                        request_id=request_id,
                        token_ids=np.array(prompt(5, seed=request_id), dtype=np.int32),
                        num_prompt_tokens=5,
                        num_computed_tokens=0,
                        blocks=[_blocks(request_id)],
                        sampling=GREEDY,
                    )
                    for request_id in new
                ],
            ),
        )
        return list(self.results.get(timeout=30).token_ids)


def _blocks(request_id: int) -> Blocks:
    return Blocks(0, np.arange(4 * request_id, 4 * request_id + 4, dtype=np.int32))


@contextmanager
def executor(model: Model, quiet: float) -> Iterator[Executor]:
    steps = Steps()
    worker = Worker(lambda: (assemble(model, LIMITS, 20, CPU, graphs=steps), INFO), on_cuda=False, quiet=quiet)
    worker.start()
    worker.loaded.result(30)
    try:
        yield Executor(worker, steps)
    finally:
        worker.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Warm, as after a start."""
    model = tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
    assemble(model, LIMITS, 20, CPU, graphs=Steps()).dummy_run(1, 1)
    return model


def test_after_idle_time_no_size_is_recorded_under_traffic(model: Model) -> None:
    with executor(model, quiet=0.001) as served:
        assert served.steps.all_are_recorded.wait(30)
        captured, replayed = graph_steps("captured"), graph_steps("replayed")
        tokens: dict[int, list[int]] = {}
        for newcomer in range(4):
            others = dict.fromkeys(range(newcomer), 1)
            for scheduled in (others | {newcomer: 5}, others | {newcomer: 1}):
                for request_id, token in zip(scheduled, served.step(scheduled), strict=True):
                    tokens.setdefault(request_id, []).append(token)
        assert (graph_steps("captured"), graph_steps("replayed")) == (captured, replayed + 8)
    for request_id, output in tokens.items():
        assert output == alone(model, prompt(5, seed=request_id), len(output))


def test_nothing_is_recorded_while_a_request_has_a_row(model: Model) -> None:
    with executor(model, quiet=1000.0) as served:
        served.step({0: 5})
        served.worker.quiet = 0.0
        for _ in range(20):
            served.step({0: 1})
        assert served.steps.num_idle == 0
        served.step({}, finished=[0])
        assert served.steps.all_are_recorded.wait(30)
        assert served.steps.num_idle == NUM_SHAPES + 1 - 2, "one request, and 8 tokens, were recorded by steps"


class SlowRunner:
    def __init__(self, record: Callable[[], None]) -> None:
        self._record = record
        self.num_recorded = 0

    def record_missing(self) -> bool:
        self.num_recorded += 1
        self._record()
        return True


def compute_for_a_while() -> None:
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass


def fail() -> None:
    raise RuntimeError("no request has waited for this")


@pytest.mark.parametrize(("record", "num_recorded"), [(compute_for_a_while, 2), (fail, 1)])
def test_a_new_request_does_not_wait_for_long_recordings(record: Callable[[], None], num_recorded: int) -> None:
    """Nor does one that fails end the executor: no request is in it."""
    runner = SlowRunner(record)
    recording = IdleRecording(runner, longest=0.005)  # type: ignore[arg-type]
    while not recording.is_done:
        recording.record_next()
    assert runner.num_recorded == num_recorded
