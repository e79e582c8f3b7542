"""Conversion between messages and the values of the model runner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc
import numpy as np

from pagewire.config.sampling_params import with_defaults
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.step.failures import Cause, Failure
from pagewire.services.executor.step.prompt_lines import PromptLines
from pagewire.services.executor.step.step import (
    MAX_LOGPROBS,
    Blocks,
    HostTokens,
    Image,
    InvalidImage,
    InvalidStep,
    NewRequest,
    SlotChange,
    Step,
    StepOutput,
)
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2, executor_pb2
from pagewire.wire.rpc import RpcError

_KINDS = {
    "generate": common_pb2.MODEL_KIND_UNSPECIFIED,
    "embed": common_pb2.MODEL_KIND_EMBED,
    "classify": common_pb2.MODEL_KIND_CLASSIFY,
}
_ROLES = {
    "both": executor_pb2.EXECUTOR_ROLE_UNSPECIFIED,
    "prefill": executor_pb2.EXECUTOR_ROLE_PREFILL,
    "decode": executor_pb2.EXECUTOR_ROLE_DECODE,
}
_TENSOR_DTYPES = ("float32", "int64")
_MAX_DIMENSIONS = 8
_MAX_INT32 = 2**31 - 1
# Sampling parameters of a request that yields a vector.
_NO_SAMPLING = common_pb2.SamplingParams(temperature=0)


def step_from_proto(message: executor_pb2.StepRequest, vocab_size: int = _MAX_INT32) -> Step:
    """Returns the step. Raises InvalidStep for inconsistent columns. A prompt with invalid token ids fails alone."""
    num_reqs = len(message.request_ids)
    num_groups = len(message.num_new_blocks) // num_reqs if num_reqs else 0
    if len(message.num_scheduled_tokens) != num_reqs or len(message.num_new_blocks) != num_reqs * num_groups:
        raise InvalidStep(
            f"step {message.step_id}: {num_reqs} request_ids, {len(message.num_scheduled_tokens)} "
            f"num_scheduled_tokens and {len(message.num_new_blocks)} num_new_blocks"
        )
    traces = _traces(message)
    if len(message.num_draft_tokens) not in (0, num_reqs):
        raise InvalidStep(f"step {message.step_id}: num_draft_tokens are not parallel to request_ids")
    if len(message.draft_methods) not in (0, num_reqs):
        raise InvalidStep(f"step {message.step_id}: draft_methods are not parallel to request_ids")
    return Step(  # of lists, which numpy reads much faster than the fields of a message
        step_id=message.step_id,
        request_ids=message.request_ids[:],
        num_scheduled_tokens=np.array(message.num_scheduled_tokens[:], dtype=np.int64),
        num_new_blocks=np.array(message.num_new_blocks[:], dtype=np.int64).reshape(num_reqs, num_groups),
        new_block_ids=np.array(message.new_block_ids[:], dtype=np.int32),
        finished_request_ids=message.finished_request_ids[:],
        new_requests=[
            _new_request(request, trace, vocab_size)
            for request, trace in zip(message.new_requests, traces, strict=True)
        ],
        num_draft_tokens=np.array(message.num_draft_tokens[:], dtype=np.int64) if message.num_draft_tokens else None,
        draft_methods=np.array(message.draft_methods[:], dtype=np.int64) if message.draft_methods else None,
        slot_changes=[SlotChange(change.slot, change.digest) for change in message.adapter_slots],
    )


def _traces(message: executor_pb2.StepRequest) -> Sequence[Trace]:
    """Returns the trace contexts of its new requests. Raises InvalidStep."""
    num_new = len(message.new_requests)
    parents, states = message.traceparents or [""] * num_new, message.tracestates or [""] * num_new
    if len(parents) != num_new or len(states) != num_new:
        raise InvalidStep(f"step {message.step_id}: traceparents or tracestates are not parallel to new_requests")
    return [Trace(*one) for one in zip(parents, states, strict=True)]


def _new_request(message: executor_pb2.NewRequest, trace: Trace, vocab_size: int) -> NewRequest:
    images, failure = _images(message.images)
    token_ids = np.array(message.token_ids, dtype=np.int32)
    if len(token_ids) and int(token_ids.view(np.uint32).max()) >= vocab_size:
        wrong = int(token_ids[(token_ids < 0) | (token_ids >= vocab_size)][0])
        failure = Failure(Cause.PROMPT, f"token id {wrong} is outside the vocabulary of {vocab_size}")
        images, token_ids = [], np.zeros_like(token_ids)
    return NewRequest(
        request_id=message.request_id,
        token_ids=token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        blocks=[Blocks(blocks.first, np.array(blocks.ids, dtype=np.int32)) for blocks in message.blocks],
        sampling=_sampling(_NO_SAMPLING if message.yields_vector else message.sampling_params, message.request_id),
        trace=trace,
        yields_vector=message.yields_vector,
        second_text_start=message.second_text_start,
        draft_domain=message.draft_domain,
        adapter_slot=message.adapter_slot,
        images=images,
        failure=failure,
    )


def _images(messages: Sequence[common_pb2.PromptImage]) -> tuple[list[Image], Failure | None]:
    """Returns the images, or the failure of their request for an invalid tensor, which is the client's error."""
    images = []
    for index, message in enumerate(messages):
        try:
            tensors = {name: _tensor(name, tensor) for name, tensor in message.tensors.items()}
        except InvalidImage as error:
            return [], Failure(Cause.IMAGE, f"images[{index}]: {error}")
        images.append(Image(message.hash, message.offset, message.num_tokens, tensors))
    return images, None


def _tensor(name: str, message: common_pb2.Tensor) -> np.ndarray:
    if message.dtype not in _TENSOR_DTYPES:
        raise InvalidImage(f"{name!r:.50} has dtype {message.dtype!r:.20}; {', '.join(_TENSOR_DTYPES)} are supported")
    shape, dtype = tuple(message.shape), np.dtype(message.dtype)
    if len(shape) > _MAX_DIMENSIONS or any(size < 1 for size in shape):
        sizes = f"up to {_MAX_DIMENSIONS} sizes from 1 on"
        raise InvalidImage(f"{name!r:.50} has the shape {list(shape)!r:.100}; {sizes} are taken")
    if len(message.data) != (num_bytes := math.prod(shape) * dtype.itemsize):
        raise InvalidImage(
            f"{name!r:.50} has {len(message.data)} bytes; {message.dtype} of the shape {list(shape)} takes {num_bytes}"
        )
    # A copy: uploaded arrays may be written to, the message's bytes may not.
    return np.frombuffer(message.data, dtype=dtype).reshape(shape).copy()


def _sampling(message: common_pb2.SamplingParams, request_id: int) -> common_pb2.SamplingParams:
    """Returns them with defaults. Raises InvalidStep for random sampling without a seed and for excessive values."""
    params = with_defaults(message)
    if params.temperature > 0 and not params.HasField("seed"):
        raise InvalidStep(f"new request {request_id} samples with temperature {params.temperature:g} but has no seed")
    if len(params.logit_bias_ids) != len(params.logit_bias_values):
        raise InvalidStep(f"new request {request_id}: logit_bias ids and values differ in number")
    for name in ("logprobs", "prompt_logprobs"):
        if not 0 <= (wanted := getattr(params, name)) <= MAX_LOGPROBS:
            raise InvalidStep(f"new request {request_id}: {name} {wanted} is not within 0..{MAX_LOGPROBS}")
    return params


def result_to_proto(
    output: StepOutput, tokens: HostTokens, execute_ns: int, queue_ns: int, idle_ns: int | None
) -> executor_pb2.StepResult:
    num_vectors = 0 if tokens.vectors is None else len(tokens.vectors)
    vectors = {} if tokens.vectors is None else _vectors(tokens.vectors, len(tokens.num_tokens))
    num_drafted = [] if tokens.num_drafted is None else tokens.num_drafted.tolist() + [0] * num_vectors
    return executor_pb2.StepResult(
        step_id=output.step_id,
        num_drafted=num_drafted,
        request_ids=output.request_ids,
        num_tokens=tokens.num_tokens.tolist() + [0] * num_vectors,
        token_ids=tokens.token_ids.tolist(),
        logprobs=_logprobs(output, tokens),
        prompt_logprobs={
            output.request_ids.index(request_id): _lines(lines) for request_id, lines in tokens.prompt_logprobs.items()
        },
        vectors=vectors,
        errors={
            request_id: _error(failure).to_message()
            for failures in (output.failures, tokens.failures)
            for request_id, failure in failures.items()
        },
        execute_ns=execute_ns,
        queue_ns=queue_ns,
        idle_ns=idle_ns,
    )


def _error(failure: Failure) -> RpcError:
    code = grpc.StatusCode.INVALID_ARGUMENT if failure.cause.is_clients_fault else grpc.StatusCode.INTERNAL
    return RpcError(code, failure.message)


def _logprobs(output: StepOutput, tokens: HostTokens) -> dict[int, common_pb2.Logprobs]:
    if tokens.logprobs is None or tokens.logprob_token_ids is None or tokens.ranks is None:
        return {}
    logprobs, end = {}, 0
    for index, num_top in output.logprobs_of:
        lines, end = slice(end, end + int(tokens.num_tokens[index])), end + int(tokens.num_tokens[index])
        logprobs[index] = common_pb2.Logprobs(
            entries_per_token=1 + num_top,
            token_ids=tokens.logprob_token_ids[lines, : 1 + num_top].ravel().tolist(),
            logprobs=tokens.logprobs[lines, : 1 + num_top].ravel().tolist(),
            ranks=tokens.ranks[lines].tolist(),
        )
    return logprobs


def _lines(lines: PromptLines) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(
        entries_per_token=lines.token_ids.shape[1],
        token_ids=lines.token_ids.ravel().tolist(),
        logprobs=lines.logprobs.ravel().tolist(),
        ranks=lines.ranks.tolist(),
    )


def _vectors(vectors: np.ndarray, first_index: int) -> dict[int, common_pb2.Vector]:
    """Returns the vectors fp32 [V, size] by index into request_ids, where they come last."""
    return {first_index + index: common_pb2.Vector(values=vector.tolist()) for index, vector in enumerate(vectors)}


def first_weights(info: ExecutorInfo, revision: str = "") -> executor_pb2.Weights:
    """Returns the weights that an executor starts with."""
    digest = info.weights_digest
    return executor_pb2.Weights(version=digest, model=info.model, revision=revision, digest=digest)


def describe_response(info: ExecutorInfo, weights: executor_pb2.Weights) -> executor_pb2.DescribeResponse:
    return executor_pb2.DescribeResponse(
        weights=weights,
        incarnation=info.incarnation,
        model_info=common_pb2.ModelInfo(
            model=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            max_logprobs=MAX_LOGPROBS,
            kind=_KINDS[info.kind],
            labels=info.labels,
            vector_size=info.vector_size,
        ),
        kv_groups=[
            executor_pb2.KVGroup(num_blocks=group.num_blocks, window=group.window, state_tokens=group.state_tokens)
            for group in info.kv_groups
        ],
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        device=info.device,
        dtype=info.dtype,
        weight_bytes=info.weight_bytes,
        kv_cache_bytes=info.kv_cache_bytes,
        max_draft_tokens=info.max_draft_tokens,
        decode_costs=[executor_pb2.StepCost(num_tokens=size, seconds=cost) for size, cost in info.decode_costs.steps],
        draft_methods=[
            executor_pb2.DraftMethod(
                name=method.name,
                rounds=[executor_pb2.StepCost(num_tokens=size, seconds=cost) for size, cost in method.rounds],
                comes_later=method.comes_later,
            )
            for method in info.decode_costs.methods
        ],
        draft_bounds=[
            executor_pb2.DraftBound(num_requests=size, max_draft_tokens=most) for size, most in info.draft_bounds
        ],
        pipeline_stages=info.pipeline_stages,
        num_ranks=info.num_ranks,
        whole_prompts=info.whole_prompts,
        predecessor_failed=info.predecessor_failed,
        role=_ROLES[info.role],
    )
