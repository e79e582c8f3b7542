"""A pipeline in one process: each rank is a model runner of its own, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pagewire.config import ExecutorConfig
from pagewire.services.executor.adapters.host import with_adapters
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.graphs.cuda_graphs import Steps
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.group import Failure, Group
from pagewire.services.executor.parallel.pipe import PeerLost
from pagewire.services.executor.parallel.stage import Stage
from pagewire.services.executor.parallel.tokens import tokens_of
from pagewire.services.executor.ranks.formation import group_with_memory, make_memory
from pagewire.services.executor.ranks.piping import make_ends, pipes_of
from pagewire.services.executor.runner.adapters import NO_ADAPTERS, Adapters
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.pipeline.pipeline_stage import PipelineStage, stage_in, stream_of
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.sampling.tokens import Tokens
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import HostTokens, Step, StepOutput

CPU = torch.device("cpu")


class LocalPipe:
    """Both ends, of two threads of one process."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[tuple[tuple[int, ...], list[Tensor]] | None] = SimpleQueue()

    def send(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._messages.put((tuple(numbers), [tensor.clone() for tensor in tensors]))

    def receive(self, tensors: Sequence[Tensor], num_numbers: int = 0) -> tuple[int, ...]:
        message = self._messages.get()
        if message is None:
            raise PeerLost("the other end is closed")
        for target, tensor in zip(tensors, message[1], strict=True):
            target.copy_(tensor)
        return message[0]

    @property
    def num_waiting(self) -> int:
        """Messages that were not received yet."""
        return self._messages.qsize()

    def close(self) -> None:
        self._messages.put(None)


def local_runners(
    models: Sequence[Model], limits: Limits, num_blocks: int, make_graphs: Callable[[], Steps | None], tokens: LocalPipe
) -> list[ModelRunner]:
    """Makes a runner for each stage. models: of the stages, first to last. tokens: for sampled ids."""
    count = len(models)
    forward, runners = [LocalPipe() for _ in models], []
    for index, model in enumerate(models):
        stage = PipelineStage(
            Stage(index, count),
            stream_of(model, limits.max_num_batched_tokens, CPU),
            before=forward[index - 1] if index else None,
            behind=forward[index] if index < count - 1 else None,
            tokens=[tokens] if index in (0, count - 1) else [],
        )
        runners.append(assemble(model, limits, num_blocks, CPU, graphs=make_graphs(), stage=stage))
    return runners


def joined_runners(
    load: Callable[[Group], Model],
    tensor: int,
    stages: int,
    limits: Limits,
    num_blocks: int,
    make_proposer: Callable[[Group, Model, Tokens], Proposer | None] = lambda group, model, tokens: None,
    max_draft_tokens: int | None = None,
    make_adapters: Callable[[Model], Adapters] = lambda model: NO_ADAPTERS,
) -> list[ModelRunner]:
    """Joined as processes are, through memory and sockets. load: the part of a rank."""
    config = ExecutorConfig(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    if max_draft_tokens is not None:
        config = replace(config, spec_method="ngram", spec_tokens=max_draft_tokens)
    memory, ends = make_memory(config), make_ends(config)
    failure = Failure(memory)
    runners = []
    for rank in reversed(range(config.num_ranks)):
        group = group_with_memory(config, rank, memory, failure, pipes_of(ends, rank, config))
        model = load(group)
        stage, tokens = (
            stage_in(group, model, limits, CPU, max_draft_tokens or 0),
            tokens_of(group, limits.max_num_batched_tokens, CPU),
        )
        proposer = make_proposer(group, model, tokens)
        adapters = make_adapters(model)
        made = assemble(
            model, limits, num_blocks, CPU, stage=stage, tokens=tokens, proposer=proposer, adapters=adapters
        )
        runners.append(made)
    return runners


class Staged:
    """A runner of all ranks for a `Driver`. A step is given to all ranks; they work at their own pace."""

    def __init__(self, runners: Sequence[ModelRunner]) -> None:
        """The leader's last."""
        self.runners = runners
        self._steps: list[SimpleQueue[tuple[Step, Future[StepOutput]] | None]] = [SimpleQueue() for _ in runners]
        self._threads = [
            threading.Thread(target=self._serve, args=pair, daemon=True)
            for pair in zip(self.runners, self._steps, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def kv_groups(self) -> Any:
        first, *others = (runner.kv_groups for runner in self.runners)
        assert all(groups == first for groups in others), "stages have other groups than each other"
        return first

    def execute(self, step: Step) -> Pending:
        """Returns the output of the last stage, at once."""
        futures: list[Future[StepOutput]] = [Future() for _ in self._steps]
        for steps, future in zip(self._steps, futures, strict=True):
            steps.put((step, future))
        return Pending(step.step_id, futures)

    def stop(self) -> None:
        for steps in self._steps:
            steps.put(None)
        for thread in self._threads:
            thread.join(10)

    def _serve(self, runner: ModelRunner, steps: SimpleQueue[tuple[Step, Future[StepOutput]] | None]) -> None:
        torch.set_num_threads(1)
        while (item := steps.get()) is not None:
            step, future = item
            try:
                if step.slot_changes:
                    assert isinstance(runner.adapters, AdapterSlots)
                    step = with_adapters(step, runner.adapters.host)
                future.set_result(runner.execute(step))
            except BaseException as error:
                future.set_exception(error)


class Pending:
    """A step on its way through the stages."""

    def __init__(self, step_id: int, futures: Sequence[Future[StepOutput]]) -> None:
        self.step_id = step_id
        self._futures = futures

    def wait(self) -> HostTokens:
        *earlier, last = self._futures
        host = last.result(30).wait()
        for future in earlier:
            future.result(30)
        return host

    @property
    def request_ids(self) -> list[int]:
        return self._futures[-1].result(30).request_ids

    @property
    def times(self) -> Any:
        return self._futures[-1].result(30).stages
