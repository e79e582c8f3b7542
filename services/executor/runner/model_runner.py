"""Executes steps: `execute()` is the whole step as a list of verbs.

Feature code does not belong here. The effect of a step on rows is in `request_state`, on KV memory in `block_table`, on
inputs in `input_batch`, on the next token in `sampler` and `sampling_state`: a new feature joins one of these, or gets
a module next to them, and is at most one more verb here. Nothing below may wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.services.executor import stats
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import NO_REQUESTS, BatchShape, InputBatch, make_batch
from pagewire.services.executor.batch.input_buffers import InputBuffers
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.results import ResultCopies
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Steps
from pagewire.services.executor.layers.pooling import Spans
from pagewire.services.executor.models.pooling import LAST_STATE, Pooling
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.adapters import NO_ADAPTERS, Adapters
from pagewire.services.executor.runner.images import NO_IMAGES, Images
from pagewire.services.executor.runner.prompt_scores import NO_PROMPT_SCORES, PromptScores
from pagewire.services.executor.runner.proposer import NO_DRAFTS, Proposer
from pagewire.services.executor.runner.stage import NO_EXCHANGE, StageExchange
from pagewire.services.executor.sampling.constraints import UNRESTRICTED, Constraints
from pagewire.services.executor.sampling.logprobs import LogprobsMode
from pagewire.services.executor.sampling.sampler import SampledTokens, SamplingExtras, sample
from pagewire.services.executor.sampling.tokens import OWN_TOKENS, Tokens
from pagewire.services.executor.step.dummy_step import DUMMY_SAMPLING, NO_STEP, dummy_step
from pagewire.services.executor.step.failures import Cause, Failure
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.prompt_lines import PromptPart
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.services.executor.step.step_context import StepImages
from pagewire.v1.common_pb2 import SamplingParams


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
        pooling: Pooling = LAST_STATE,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        proposer: Proposer = NO_DRAFTS,
        tokens: Tokens = OWN_TOKENS,
        stage: StageExchange = NO_EXCHANGE,
        constraints: Constraints = UNRESTRICTED,
        images: Images = NO_IMAGES,
        prompt_scores: PromptScores = NO_PROMPT_SCORES,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        """num_blocks: blocks of a group of layers that sees all tokens; others may have fewer (`kv_cache.kv_groups`).

        attention_split_size: see the reference of `paged_attention`. graphs: how steps are launched; by default
        eagerly, until `use_graphs`. pooling: how vectors are made. The remaining parameters fill the seams
        (`start.assembly`); by default each is empty.
        """
        self.limits = limits
        self._model = model
        self._device = device
        self._split_size = attention_split_size
        self._copies = ResultCopies(device)
        self.kv_groups = kv_cache.kv_groups(model, num_blocks, limits)
        pool_sizes = [group.num_blocks for group in self.kv_groups]
        self.kv_caches = kv_cache.allocate(model, pool_sizes, limits.block_size, device, limits.state_tokens)
        config, max_blocks = model.config, -(-limits.max_model_len // limits.block_size)
        self._state = RequestState(
            limits.max_num_seqs, limits.max_model_len, config.vocab_size, config.eos_token_ids, device, constraints
        )
        block_tokens = [group.block_tokens(limits) for group in self.kv_groups]
        self._block_tables = BlockTables(limits.max_num_seqs, max_blocks, pool_sizes, block_tokens, device)
        self.proposer = proposer
        self.kv_caches += proposer.kv_caches
        self.pooling = pooling
        self._images = images
        self._logprobs_mode = logprobs_mode
        self._tokens = tokens
        self.stage = stage
        self._prompt_scores = prompt_scores
        self.adapters = adapters
        self._inputs = InputBuffers(
            limits.max_num_seqs, limits.max_num_batched_tokens, self._block_tables, device, self.max_draft_tokens
        )
        self._graphs: Steps = graphs or CudaGraphs()
        self._eager: Steps = CudaGraphs()  # has no graphs

    def reset(self) -> None:
        """Forgets all requests and the contents of the KV cache."""
        self._state.reset()
        self._images.reset()
        self._prompt_scores.reset()
        self.adapters.reset()
        self.proposer.reset()

    def on_other_weights(self) -> None:
        """Forgets everything that was computed with the previous weights."""
        self.reset()
        self._images.on_other_weights()
        self.proposer.on_other_weights()

    @property
    def model(self) -> Model:
        return self._model

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a request in one step."""
        return self.proposer.max_draft_tokens

    @property
    def smallest_image(self) -> int:
        """Tokens of the smallest image; 0: the model reads none."""
        return self._images.smallest

    @property
    def max_prompt_lines(self) -> int:
        """Most tokens of prompts that are scored at once."""
        return self._prompt_scores.max_lines

    @property
    def num_requests(self) -> int:
        """Rows in use."""
        return len(self._state)

    @torch.inference_mode()
    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        """Launches one step. Raises InvalidStep, after which the state is undefined until `reset()`.

        launching: called with the step's load (`InputBatch.load`) before the forward pass, after all its inputs were
        sent to the device.
        """
        self.stage.begin(step, self._state)
        self._state.settle()
        step = self._images.update(step)
        self._prompt_scores.update(step)
        self._remove_finished(step)
        self.adapters.update(step, self._state)
        self._add_new(step)
        if not step.request_ids:
            return StepOutput(step.step_id, [], [], 0, None)
        step, batch = self._make_batch(step)
        images = self._images.of(batch, step, self._state)
        graphs = self._graphs if images is None else self._eager
        shape = graphs.padded(batch.shape)
        self._inputs.stage(batch, step, self._block_tables, shape)
        launching(batch.load)
        self.stage.receive(batch, self._state)
        hidden = graphs.run("forward", shape, lambda: self._forward(shape, images))
        if not self.stage.is_last:
            return self._pass_on(step, batch)
        sampled = self._sample(hidden, batch, shape, graphs) if len(batch.sampled) else None
        self.stage.end(None if sampled is None else sampled.token_ids)
        results = self._results(hidden, batch, sampled)
        prompt_parts, lines = self._prompt_scores.compute(hidden, batch, step, self._state)
        stats.GRAPH_STEPS.labels(graphs.mode(shape), stats.step_kind(step)).inc()
        return self._output(step, batch, results | lines, prompt_parts)

    def _remove_finished(self, step: Step) -> None:
        for request_id in step.finished_request_ids:
            self._state.remove(request_id)

    def _add_new(self, step: Step) -> None:
        if step.new_requests:
            rows = self._state.add(step.new_requests)
            self._block_tables.fill(rows, [request.blocks for request in step.new_requests])

    def _make_batch(self, step: Step) -> tuple[Step, InputBatch]:
        """Returns the step with its actual number of drafts, and its batch."""
        rows = self._state.rows(step.request_ids)
        self._block_tables.append(rows, step.num_new_blocks, step.new_block_ids)
        num_slots = self._block_tables.num_slots(rows, self.limits.max_model_len)
        limits = num_slots, self.limits.max_num_batched_tokens, self.max_draft_tokens
        batch = make_batch(step, rows, self._state, *limits)
        drafted = step.drafting(self.proposer.propose(step, batch, self._state, self._block_tables))
        return drafted, batch if drafted is step else make_batch(drafted, rows, self._state, *limits)

    def _forward(self, shape: BatchShape, images: StepImages | None) -> Tensor:
        """Returns hidden states [num_tokens, hidden_size] of the staged step."""
        stream = self.stage.stream(shape.num_tokens)
        input_ids, context = self._inputs.gather(
            shape, self._state, self._block_tables, self.limits.block_size, self._split_size, images, stream
        )
        self.adapters.use(context.adapter_slots)
        return self._model.forward(input_ids, context)

    def _sample(self, hidden: Tensor, batch: InputBatch, shape: BatchShape, graphs: Steps) -> SampledTokens:
        """Samples, and writes each token behind its sequence for the next step."""
        num_sampled, has_drafts = len(batch.sample_rows), batch.offsets is not None
        extras, is_shared = self._prepare_extras(batch), self._tokens is not OWN_TOKENS
        if extras is None and not is_shared:
            tokens = graphs.run("sample", shape, lambda: self._sample_plain(hidden, shape, has_drafts))
            return SampledTokens(tokens[:num_sampled].clone(), None)  # a replay overwrites them with the next step's
        # NCCL: either all ranks capture what they do together or none; what only the leader does lies in between.
        graphs = graphs if is_shared else self._eager
        logits = graphs.run("logits", shape, lambda: self._logits(hidden, shape))[:num_sampled]
        rows, extras = self._inputs.sample_rows(shape.num_sampled), extras or SamplingExtras()
        offsets = self._inputs.offsets(num_sampled) if has_drafts else None
        of_rows, mode = (self._state.columns, self._state.token_ids), self._logprobs_mode
        sampled = self._tokens.draw(lambda: sample(logits, rows[:num_sampled], *of_rows, extras, offsets, mode))
        if is_shared:
            shared = graphs.run("tokens", shape, lambda: self._tokens.share(rows, *of_rows, appends=not has_drafts))
            sampled = replace(sampled, token_ids=shared[:num_sampled].clone())
        if has_drafts:
            self._inputs.accept(sampled.token_ids, shape, self._state)
        return sampled

    def _logits(self, hidden: Tensor, shape: BatchShape) -> Tensor:
        return self._model.compute_logits(self._inputs.select_sampled(shape, hidden))

    def _prepare_extras(self, batch: InputBatch) -> SamplingExtras | None:
        state, offsets = self._state, batch.offsets
        num_tokens = state.least_num_tokens(batch.sample_rows)
        at = num_tokens if offsets is None else num_tokens + offsets
        return state.sampling.prepare(batch.sample_rows, at, self._device, is_exact=state.is_exact, offsets=offsets)

    def _sample_plain(self, hidden: Tensor, shape: BatchShape, has_drafts: bool) -> Tensor:
        """Returns token ids int64 [num_sampled] of requests that only use temperature, top-k, top-p and min-p."""
        logits = self._logits(hidden, shape)
        rows = self._inputs.sample_rows(shape.num_sampled)
        offsets = self._inputs.offsets(shape.num_sampled) if has_drafts else None
        sampled = self._tokens.sample(logits, rows, self._state.columns, self._state.token_ids, offsets)
        if has_drafts:
            self._inputs.accept(sampled, shape, self._state)
        return sampled

    def _pass_on(self, step: Step, batch: InputBatch) -> StepOutput:
        """Passes the step on to the next stage; the last one samples and answers."""
        drafted = self._state.advance(batch.rows, batch.query_lens, batch.sampled_rows, batch.num_samples)
        self.stage.pass_on(batch, self._state, drafted)
        return StepOutput(step.step_id, [], [], batch.num_tokens, None)

    def _results(self, hidden: Tensor, batch: InputBatch, sampled: SampledTokens | None) -> dict[str, Tensor]:
        """Returns copies of the results for the host, by the names of `HostTokens`."""
        results = {} if sampled is None else sampled.tensors()
        if sampled is not None and batch.num_samples is not None:
            indices = upload(self._device, {"sampled": batch.sampled})["sampled"]
            results["num_gained"] = self._inputs.num_gained(len(batch.rows)).index_select(0, indices)
        if len(batch.vectors):
            spans = Spans.of(batch.query_lens, batch.vectors, self._device)
            results["vectors"] = self.pooling.pooler(hidden[: batch.num_tokens], spans)
        return results

    def _output(
        self, step: Step, batch: InputBatch, results: dict[str, Tensor], prompt_parts: Sequence[PromptPart]
    ) -> StepOutput:
        """Returns the output of a launched step, and advances the counts of rows."""
        yielding = [*batch.sampled.tolist(), *batch.vectors.tolist()]
        errors = self._state.sampling.constraints.errors(batch.sampled_rows)
        output = StepOutput(
            step_id=step.step_id,
            request_ids=[step.request_ids[index] for index in yielding],
            logprobs_of=self._state.sampling.logprobs_of(batch.sampled_rows),
            num_tokens=batch.num_tokens,
            pending=self._copies.fetch(results) if results else None,
            drafted=self._state.advance(batch.rows, batch.query_lens, batch.sampled_rows, batch.num_samples),
            vocab_size=self._model.config.vocab_size,
            failures={request.request_id: request.failure for request in step.new_requests if request.failure}
            | {step.request_ids[batch.sampled[i]]: Failure(Cause.GRAMMAR, error) for i, error in errors.items()},
            prompt_parts=prompt_parts,
            stages=self.stage.times,
        )
        self._state.sampling.constraints.follow(output, batch.sampled_rows)
        return output

    def use_graphs(self, graphs: Steps) -> None:
        """Launches later steps through these graphs."""
        self._graphs = graphs

    @torch.inference_mode()
    def record_missing(self) -> bool:
        """Runs an empty step of a shape that is not recorded yet. May be called between steps, also while requests
        have rows. Returns False if there is no such shape. Not for several stages: others would have to take part."""
        if self.proposer.prepare():
            return True
        if self.stage is not NO_EXCHANGE or (shape := self._graphs.missing()) is None:
            return self.proposer.record_missing()
        self._inputs.stage(NO_REQUESTS, NO_STEP, self._block_tables, shape)
        hidden = self._graphs.run("forward", shape, lambda: self._forward(shape, None))
        if shape.is_uniform or shape.has_drafts_only:
            self._graphs.run("sample", shape, lambda: self._sample_plain(hidden, shape, shape.has_drafts_only))
        return True

    def uniform_run(self, shape: BatchShape, *, sampling: SamplingParams = DUMMY_SAMPLING) -> None:
        """Executes a dummy run of a uniform step."""
        size, num_drafts = (shape.num_reqs, shape.num_tokens), shape.max_query_len - 1
        self.dummy_run(*size, sampling=sampling, num_draft_tokens=num_drafts, has_adapters=shape.has_adapters)

    def dummy_run(
        self,
        num_reqs: int,
        num_tokens: int,
        *,
        context_len: int = 0,
        sampling: SamplingParams = DUMMY_SAMPLING,
        num_draft_tokens: int = 0,
        with_images: bool = False,
        has_adapters: bool = False,
    ) -> None:
        """Runs a `dummy_step` through `execute()` and forgets its requests, each of which samples a token. with_images:
        the first one's prompt consists of the largest images that it has room for. has_adapters: each has one."""
        step = dummy_step(
            self.limits,
            len(self.kv_groups),
            num_reqs,
            num_tokens,
            context_len=context_len,
            sampling=self._tokens.sampling(sampling),
            num_draft_tokens=num_draft_tokens,
            yields_vectors=not self.pooling.generates,
        )
        if with_images:
            first, *others = step.new_requests
            step = replace(step, new_requests=[self._images.filled(first), *others])
        if has_adapters:
            step = self.adapters.on_all(step)
        self.reset()
        output = self.execute(step)
        assert not output.failures, output.failures
        output.wait()
        self.reset()
