"""The scheduler and a fake executor without anything between them, for tests of the pure core."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from pagewire.config import SchedulerConfig
from pagewire.sampling_params import InvalidRequest, resolve
from pagewire.services.scheduler.request import FinishReason, Request
from pagewire.services.scheduler.scheduler import Scheduler
from pagewire.services.scheduler.step import ExecutorInfo, Outputs, Step, StepResult
from pagewire.v1.common_pb2 import SamplingParams
from tests.fakes import FakeExecutor


def info_of(executor: FakeExecutor, max_model_len: int = 1 << 20) -> ExecutorInfo:
    return ExecutorInfo(
        incarnation=1,
        model="fake",
        max_model_len=max_model_len,
        vocab_size=executor.vocab_size,
        eos_token_ids=executor.eos_token_ids,
        max_logprobs=20,
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
    )


class PureLine:
    """Steps are executed when they are scheduled; their results arrive when `receive` is called."""

    def __init__(
        self, executor: FakeExecutor, *, max_model_len: int = 1 << 20, attach: bool = True, **config: Any
    ) -> None:
        self.executor = executor
        self.info = info_of(executor, max_model_len)
        self.config = SchedulerConfig(**config)
        self.scheduler = Scheduler(self.config)
        self.steps: list[Step] = []
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, list[FinishReason]] = {}
        self.errors: dict[int, InvalidRequest] = {}
        self.condemned: list[Request] = []  # ended because executors died of them
        self._results: deque[StepResult] = deque()
        self._num_requests = 0
        if attach:
            self.attach()

    def attach(self) -> None:
        for request, error in self.scheduler.attach(self.info):
            self._note_end(request)
            if error is not None:
                self.errors[request.request_id] = error

    def die(self, successor: FakeExecutor | None = None) -> None:
        """The executor loses everything, steps in flight included, and comes back, or another one does."""
        for request in self.scheduler.detach():
            self._note_end(request)
            self.condemned.append(request)
        self.scheduler.check_integrity()
        self.executor.reset()
        if successor is not None:
            self.executor = successor
            self.info = info_of(successor, self.info.max_model_len)
        self._results.clear()
        self.attach()

    def add(
        self, prompt: Sequence[int], resume: Sequence[int] = (), *, is_resubmitted: bool = False, **params: Any
    ) -> Request:
        self._num_requests += 1
        sampling_params = resolve(SamplingParams(**params))
        request = Request(
            self._num_requests, list(prompt), sampling_params, list(resume), is_resubmitted=is_resubmitted
        )
        self.outputs[request.request_id] = []
        self.ends[request.request_id] = []
        if not self.scheduler.add_request(request):
            self._note_end(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        self._note_end(request)
        self.scheduler.check_integrity()

    def schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            self.steps.append(step)
            self._results.append(self.executor.execute(step))
        return step

    def receive(self) -> Outputs:
        outputs = self.scheduler.update(self._results.popleft())
        self.scheduler.check_integrity()
        for request, token_id in zip(outputs.requests, outputs.token_ids, strict=True):
            assert not self.ends[request.request_id], "a token after the end"
            self.outputs[request.request_id].append(token_id)
            if request.finish_reason is not None:
                self._note_end(request)
        return outputs

    @property
    def num_in_flight(self) -> int:
        return len(self._results)

    def run(self, max_steps: int = 10_000) -> None:
        """Runs until everybody has ended, as many steps in flight as the scheduler gives."""
        for _ in range(max_steps):
            while self.schedule() is not None:
                pass
            if not self.num_in_flight:
                break
            self.receive()
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0, "requests are stuck"

    def _note_end(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.ends[request.request_id].append(request.finish_reason)
