"""Executes steps: `execute()` is the whole of it, and a list of verbs.

Feature code does not belong here. What a step means for a row lives in `request_state`, for KV memory in `block_table`,
for inputs in `input_batch`, for the next token in `sampler` and `sampling_state`: a new feature joins one of them, or
stands beside them, and is at most one more verb here. Nothing below may wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.sampling_params import with_defaults
from pagewire.services.executor import kv_cache, stats
from pagewire.services.executor.block_table import BlockTable
from pagewire.services.executor.cuda_graphs import CudaGraphs, Function, Graph, Steps, cuda_recorder
from pagewire.services.executor.input_batch import BatchShape, InputBatch, InputBuffers, make_batch
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.request_state import RequestState
from pagewire.services.executor.sampler import SampledTokens, sample, sample_tokens
from pagewire.services.executor.step import NewRequest, PendingTokens, Step, StepOutput
from pagewire.v1.common_pb2 import SamplingParams

DUMMY_SAMPLING = with_defaults(SamplingParams(seed=0, top_k=50, top_p=0.9))


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

    def __init__(
        self,
        model: Model,
        limits: Limits,
        num_blocks: int,
        device: torch.device,
        *,
        attention_split_size: int = 0,
        graphs: Steps | None = None,
    ) -> None:
        """attention_split_size: see the reference of `paged_attention`.

        graphs: how steps are launched; by default eagerly, until `capture_graphs`.
        """
        self.limits = limits
        self.num_blocks = num_blocks
        self._model = model
        self._device = device
        self._split_size = attention_split_size
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.kv_caches = kv_cache.allocate(model, num_blocks, limits.block_size, device)  # of each group of layers
        config, max_blocks = model.config, -(-limits.max_model_len // limits.block_size)
        self._state = RequestState(
            limits.max_num_seqs, limits.max_model_len, config.vocab_size, config.eos_token_ids, device
        )
        self._block_table = BlockTable(limits.max_num_seqs, max_blocks, num_blocks, device)
        self._inputs = InputBuffers(
            limits.max_num_seqs, limits.max_num_batched_tokens, self._block_table, num_blocks, device
        )
        self._graphs: Steps = graphs or CudaGraphs()

    def reset(self) -> None:
        """Forgets all requests. What the KV cache holds is nobody's any more."""
        self._state.reset()

    @property
    def num_requests(self) -> int:
        """Rows in use."""
        return len(self._state)

    @torch.inference_mode()
    def execute(self, step: Step, launching: Callable[[], None] = lambda: None) -> StepOutput:
        """Launches one step. Raises ProtocolError, after which the state is undefined until `reset()`.

        launching: called before the forward pass, when everything it reads is on its way to the device.
        """
        self._remove_finished(step)
        self._add_new(step)
        if not step.request_ids:
            return StepOutput(step.step_id, [], [], 0, None)
        batch = self._make_batch(step)
        shape = self._graphs.padded(batch.shape)
        self._inputs.stage(batch, step, self._block_table, shape)
        launching()
        hidden = self._graphs.run("forward", shape, lambda: self._forward(shape))
        sampled = self._sample(hidden, batch, shape) if len(batch.sampled) else None
        self._state.advance(batch.rows, batch.query_lens, batch.sampled_rows)
        stats.GRAPH_STEPS.labels(self._graphs.mode(shape)).inc()
        return self._output(step, batch, sampled)

    def _remove_finished(self, step: Step) -> None:
        for request_id in step.finished_request_ids:
            self._state.remove(request_id)

    def _add_new(self, step: Step) -> None:
        if step.new_requests:
            rows = self._state.add(step.new_requests)
            self._block_table.fill(rows, [request.block_ids for request in step.new_requests])

    def _make_batch(self, step: Step) -> InputBatch:
        rows = self._state.rows(step.request_ids)
        self._block_table.append(rows, step.num_new_blocks, step.new_block_ids)
        num_slots = self._block_table.num_blocks[rows] * self.limits.block_size
        return make_batch(step, rows, self._state, num_slots, self.limits.max_num_batched_tokens)

    def _forward(self, shape: BatchShape) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of the step that is staged."""
        input_ids, context = self._inputs.gather(
            shape, self._state, self._block_table, self.limits.block_size, self._split_size
        )
        return self._model.forward(input_ids, context)

    def _sample(self, hidden: Tensor, batch: InputBatch, shape: BatchShape) -> SampledTokens:
        """Samples, and writes each token behind its sequence, where the next step finds it."""
        state, num_sampled = self._state, len(batch.sampled)
        extras = state.sampling.prepare(batch.sampled_rows, state.num_tokens[batch.sampled_rows], self._device)
        if extras is None:
            tokens = self._graphs.run("sample", shape, lambda: self._sample_plain(hidden, shape))
            return SampledTokens(tokens[:num_sampled].clone(), None)  # where a replay writes the next step's
        logits = self._model.compute_logits(self._inputs.select_sampled(shape, hidden)[:num_sampled])
        return sample(logits, self._inputs.sampled_rows(num_sampled), state.columns, state.token_ids, extras)

    def _sample_plain(self, hidden: Tensor, shape: BatchShape) -> Tensor:
        """Token ids int64 [num_sampled], of requests that want no more than temperature, top-k, top-p and min-p."""
        logits = self._model.compute_logits(self._inputs.select_sampled(shape, hidden))
        rows = self._inputs.sampled_rows(shape.num_sampled)
        return sample_tokens(logits, rows, self._state.columns, self._state.token_ids)

    def _output(self, step: Step, batch: InputBatch, sampled: SampledTokens | None) -> StepOutput:
        return StepOutput(
            step_id=step.step_id,
            request_ids=[step.request_ids[index] for index in batch.sampled.tolist()],
            logprobs_of=self._state.sampling.logprobs_of(batch.sampled_rows),
            num_tokens=batch.num_tokens,
            pending=None if sampled is None else PendingTokens.fetch(sampled, self._copy_stream),
        )

    def capture_graphs(
        self,
        sizes: Sequence[int],
        progress: Callable[[float, str], None],
        record: Callable[[Function], Graph] | None = None,
    ) -> None:
        """Captures decode steps of these numbers of requests, the largest first: the others fit into its memory."""
        record, graphs = record or cuda_recorder(), CudaGraphs()
        self._graphs = graphs
        falling = sorted(sizes, reverse=True)
        for size in falling:  # before there is a larger graph that it would be padded to: compiles what is recorded
            self.dummy_run(size, size)
        for index, size in enumerate(falling):
            progress(index / len(sizes), f"CUDA graph of {size} requests")
            graphs.capture(size, record, partial(self.dummy_run, size, size))

    def dummy_run(
        self, num_reqs: int, num_tokens: int, *, context_len: int = 0, sampling: SamplingParams = DUMMY_SAMPLING
    ) -> None:
        """Runs a step of fake requests through `execute()`, `num_tokens` in all at most, and forgets them.

        The first ones are as long as they can be, the others have one token. Every request samples a token, so that
        the sampler's part is in the profile too. The very first has up to context_len tokens more, as if computed
        before. All write to block 0, which therefore must not be in use.
        """
        limits = self.limits
        num_tokens = min(num_tokens, limits.max_num_batched_tokens)
        num_reqs = min(num_reqs, limits.max_num_seqs, num_tokens)
        lens, left = list[int](), num_tokens
        for others in reversed(range(num_reqs)):
            lens.append(min(left - others, limits.max_model_len - 1))
            left -= lens[-1]
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
