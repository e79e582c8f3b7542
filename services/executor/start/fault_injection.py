"""Steps that fail on purpose, to test the effect on the request that makes them fail and on its neighbours.

Nothing here runs unless `--fault-injection` maps token ids to faults. A request has a fault if its prompt has one of
these ids.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewire.config.values.faults import Fault, Kind
from pagewire.services.executor.batch.input_batch import BatchShape, InputBatch
from pagewire.services.executor.graphs.cuda_graphs import Steps
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.sampling.sampler import SampledTokens
from pagewire.services.executor.step.step import Step, StepOutput

logger = logging.getLogger(__name__)


class FaultyRunner(ModelRunner):
    """A runner that fails as the prompts demand."""

    def __init__(self, faults: Mapping[int, Fault], *arguments: Any, **options: Any) -> None:
        """arguments, options: ModelRunner's."""
        super().__init__(*arguments, **options)
        self._faults = faults
        self._poisoned: dict[int, tuple[Fault, int]] = {}  # request id -> fault, tokens before it
        self._is_broken = False
        logger.critical(
            "FAULT INJECTION IS ON (--fault-injection): prompts with these token ids make steps fail: %s; use it for "
            "tests only",
            ", ".join(f"{token_id} = {fault.kind}" for token_id, fault in faults.items()),
        )

    def reset(self) -> None:
        super().reset()
        self._poisoned.clear()

    def execute(self, step: Step, *arguments: Any) -> StepOutput:
        if self._is_broken:
            raise RuntimeError("injected: the device is broken")
        return super().execute(step, *arguments)

    def _remove_finished(self, step: Step) -> None:
        super()._remove_finished(step)
        for request_id in step.finished_request_ids:
            self._poisoned.pop(request_id, None)

    def _add_new(self, step: Step) -> None:
        super()._add_new(step)
        for request in step.new_requests:
            prompt = request.token_ids[: request.num_prompt_tokens].tolist()
            fault = next((self._faults[token_id] for token_id in prompt if token_id in self._faults), None)
            if fault is not None:
                self._poisoned[request.request_id] = fault, request.num_prompt_tokens + fault.num_output_tokens

    def _make_batch(self, step: Step) -> tuple[Step, InputBatch]:
        step, batch = super()._make_batch(step)
        self._due = [self._due_fault(step.request_ids[index], row) for index, row in enumerate(batch.rows.tolist())]
        if Kind.RAISE in self._due:
            raise RuntimeError("injected: a step fails")
        if Kind.DEVICE in self._due:
            self._is_broken = True
            raise RuntimeError("injected: the device is broken")
        if Kind.HANG in self._due:
            threading.Event().wait()
        if Kind.EXIT in self._due:
            os._exit(70)
        return step, batch

    def _due_fault(self, request_id: int, row: int) -> Kind | None:
        fault, first = self._poisoned.get(request_id, (None, 0))
        if fault is None or self._state.num_tokens[row] < first:
            return None
        logger.critical("injecting %s by request %d", fault.kind, request_id)
        return fault.kind

    def _sample(self, hidden: Tensor, batch: InputBatch, shape: BatchShape, graphs: Steps) -> SampledTokens:
        kinds = [self._due[index] for index in batch.sampled]
        ends = batch.query_lens.cumsum()
        for index, kind in zip(batch.sampled, kinds, strict=True):
            if kind is Kind.NAN:
                hidden[ends[index] - batch.query_lens[index] : ends[index]] = torch.nan
        sampled = super()._sample(hidden, batch, shape, graphs)
        num_samples = np.ones(len(kinds), dtype=np.int64) if batch.num_samples is None else batch.num_samples
        firsts = num_samples.cumsum() - num_samples  # first position of each request
        for index in firsts[[kind is Kind.ILLEGAL for kind in kinds]].tolist():
            sampled.token_ids[index] = self._model.config.vocab_size + 1
        return sampled
