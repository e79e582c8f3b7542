"""Executes steps: `execute()` is the whole of it, and a list of verbs.

Feature code does not belong here. What a step means for a row lives in `request_state`, for KV memory in `block_table`,
for inputs in `input_batch`, for the next token in `sampler` and `sampling_state`: a new feature joins one of them, or
stands beside them, and is at most one more verb here. Nothing below may wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagewire.errors import StartupError
from services.executor import kv_cache
from services.executor.block_table import BlockTable
from services.executor.input_batch import InputBatch, prepare_inputs
from services.executor.loader import Model
from services.executor.request_state import RequestState
from services.executor.sampler import SampledTokens, sample
from services.executor.step import NewRequest, PendingTokens, RowSampling, Step, StepOutput

DUMMY_SAMPLING = RowSampling(top_k=50, top_p=0.9)


@dataclass(frozen=True)
class Limits:
    """What rows and steps are bounded by; tokens and requests, all >= 1. Raises StartupError if no request fits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise StartupError(
                "a request could have one token in all, its prompt's, and nothing to generate: raise --max-model-len "
                "or --num-gpu-blocks-override"
            )


class ModelRunner:
    """One model on one device. All calls come from the device thread."""

    def __init__(self, model: Model, limits: Limits, num_blocks: int, device: torch.device) -> None:
        self.limits = limits
        self.num_blocks = num_blocks
        self._model = model
        self._device = device
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        model.bind_kv_cache(kv_cache.allocate(model, num_blocks, limits.block_size, device))
        self.reset()

    def reset(self) -> None:
        """Forgets all requests. What the KV cache holds is nobody's any more."""
        config, limits = self._model.config, self.limits
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self._state = RequestState(
            limits.max_num_seqs, limits.max_model_len, config.vocab_size, config.eos_token_ids, self._device
        )
        self._block_table = BlockTable(limits.max_num_seqs, max_blocks, self.num_blocks, self._device)

    @property
    def num_requests(self) -> int:
        """Rows in use."""
        return len(self._state)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepOutput:
        """Launches one step. Raises ProtocolError, after which the state is undefined until `reset()`."""
        self._remove_finished(step)
        self._add_new(step)
        if not step.request_ids:
            return StepOutput(step.step_id, [], [], 0, None)
        rows = self._state.rows(step.request_ids)
        self._block_table.append(rows, step.num_new_blocks, step.new_block_ids)
        batch = self._prepare_inputs(step, rows)
        hidden = self._model.forward(batch.input_ids, batch.positions, batch.attn)
        sampled = self._sample(hidden, batch) if len(batch.sampled) else None
        self._state.advance(rows, step.num_scheduled_tokens, batch.sampled_rows)
        return self._output(step, batch, sampled)

    def _remove_finished(self, step: Step) -> None:
        for request_id in step.finished_request_ids:
            self._block_table.clear(self._state.remove(request_id))

    def _add_new(self, step: Step) -> None:
        for request in step.new_requests:
            row = self._state.add(request)
            self._block_table.append(np.array([row]), np.array([len(request.block_ids)]), request.block_ids)

    def _prepare_inputs(self, step: Step, rows: np.ndarray) -> InputBatch:
        limits = self.limits
        return prepare_inputs(
            step,
            rows,
            self._state,
            self._block_table,
            limits.block_size,
            limits.max_num_batched_tokens,
            self._device,
        )

    def _sample(self, hidden: torch.Tensor, batch: InputBatch) -> SampledTokens:
        """Samples, and writes each token behind its sequence, where the next step finds it."""
        state = self._state
        logits = self._model.compute_logits(hidden[batch.attn.logits_indices]).float()
        parameters = state.sampling.prepare(batch.sampled_rows, state.num_tokens[batch.sampled_rows], self._device)
        sampled = sample(logits, parameters, state.token_ids)
        state.token_ids[batch.sampled_rows_tensor, batch.sampled_positions] = sampled.token_ids.int()
        return sampled

    def _output(self, step: Step, batch: InputBatch, sampled: SampledTokens | None) -> StepOutput:
        return StepOutput(
            step_id=step.step_id,
            request_ids=[step.request_ids[index] for index in batch.sampled.tolist()],
            logprobs_of=self._state.sampling.logprobs_of(batch.sampled_rows),
            num_tokens=batch.num_tokens,
            pending=None if sampled is None else PendingTokens.fetch(sampled, self._copy_stream),
        )

    def dummy_run(
        self, num_reqs: int, num_tokens: int, *, context_len: int = 0, sampling: RowSampling = DUMMY_SAMPLING
    ) -> None:
        """Runs a step of fake requests through `execute()`, `num_tokens` in all at most, and forgets them.

        Every request samples a token, so that the sampler's part is in the profile too. The first one has up to
        context_len tokens more, as if computed before. All write to block 0, which therefore must not be in use.
        """
        limits = self.limits
        num_tokens = min(num_tokens, limits.max_num_batched_tokens)
        num_reqs = min(num_reqs, limits.max_num_seqs, num_tokens)
        lens = [num_tokens // num_reqs + (index < num_tokens % num_reqs) for index in range(num_reqs)]
        lens = [min(length, limits.max_model_len - 1) for length in lens]
        context_lens = [min(context_len, limits.max_model_len - 1 - lens[0]), *[0] * (num_reqs - 1)]
        self.reset()
        self.execute(
            Step(
                step_id=0,
                request_ids=list(range(num_reqs)),
                num_scheduled_tokens=np.array(lens, dtype=np.int64),
                num_new_blocks=np.zeros(num_reqs, dtype=np.int64),
                new_block_ids=np.empty(0, dtype=np.int32),
                new_requests=[
                    NewRequest(
                        request_id=index,
                        token_ids=np.zeros(context + length, dtype=np.int32),
                        num_prompt_tokens=context + length,
                        num_computed_tokens=context,
                        block_ids=np.zeros(-(-(context + length) // limits.block_size), dtype=np.int32),
                        sampling=sampling,
                    )
                    for index, (context, length) in enumerate(zip(context_lens, lens, strict=True))
                ],
            )
        ).wait()
        self.reset()
