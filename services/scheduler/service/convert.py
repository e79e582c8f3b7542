"""Conversion of messages to values and back."""

from collections.abc import Mapping, Sequence

from pagewire.config import SchedulerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.config.sampling_params import MAX_CACHE_SALT
from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.service.request_output import RequestOutput
from pagewire.services.scheduler.values.executor_info import (
    Adapter,
    DraftMethod,
    ExecutorInfo,
    FoundAdapter,
    KVGroup,
    Weights,
)
from pagewire.services.scheduler.values.images import NO_IMAGES, PromptImages
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import NewRequest, ScheduledStep, StepClock, StepResult
from pagewire.services.scheduler.values.tenant import Tenant
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2, executor_pb2, scheduler_link_pb2, scheduler_pb2

# -- clients ---------------------------------------------------------------------------------------------------------


_DEFAULTS = SchedulerConfig()
_ROLES = {executor_pb2.EXECUTOR_ROLE_PREFILL: "prefill", executor_pb2.EXECUTOR_ROLE_DECODE: "decode"}
# After requests without a priority, which have 0.
_BATCH_PRIORITY = 100


def to_request(
    request_id: int,
    submission: scheduler_link_pb2.TokenSubmission,
    config: SchedulerConfig = _DEFAULTS,
    adapter_digest: str = "",
) -> Request:
    """Returns the request of a submission. adapter_digest: of its adapter, if it has one.

    Raises InvalidRequest, which names the wrong field of the TokenRequest.
    """
    message = submission.request
    if not message.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids is empty; a prompt has at least one token", "prompt_token_ids")
    if not 0 <= message.second_text_start < len(message.prompt_token_ids):
        raise InvalidRequest(
            f"second_text_start is {message.second_text_start}; the prompt has {len(message.prompt_token_ids)} tokens",
            "second_text_start",
        )
    if len(message.cache_salt) > MAX_CACHE_SALT:
        raise InvalidRequest(
            f"cache_salt has {len(message.cache_salt)} characters; {MAX_CACHE_SALT} are possible", "cache_salt"
        )
    params = resolve(message.sampling_params)
    has_priorities = config.scheduling_policy == "priority"
    if params.priority and not has_priorities:
        raise InvalidRequest(
            f"priority is {params.priority}, but requests run in the order of their arrival; leave it out, or start the"
            " scheduler with --scheduling-policy priority",
            "sampling_params.priority",
        )
    if has_priorities and submission.context.is_batch and not params.priority:
        params.priority = _BATCH_PRIORITY
    return Request(
        request_id,
        list(message.prompt_token_ids),
        params,
        list(submission.resume_token_ids),
        is_resubmitted=submission.resubmitted,
        yields_vector=message.yields_vector,
        second_text_start=message.second_text_start,
        images=PromptImages(submission.images, len(message.prompt_token_ids)) if submission.images else NO_IMAGES,
        cache_salt=message.cache_salt,
        cache_owner="" if config.prefix_cache_sharing == "all" else submission.context.tenant,
        tenant=Tenant(
            submission.context.tenant, submission.context.tenant_weight, submission.context.tokens_per_minute
        ),
        weights_version=submission.weights_version,
        adapter_digest=adapter_digest,
    )


def from_info(info: ExecutorInfo, adapters: Sequence[Adapter] = ()) -> common_pb2.ModelInfo:
    """Returns the model of executors. adapters: those that requests may name."""
    return common_pb2.ModelInfo(
        model=info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=sorted(info.eos_token_ids),
        max_logprobs=info.max_logprobs,
        kind=info.kind,  # type: ignore[arg-type]
        labels=info.labels,
        vector_size=info.vector_size,
        adapters=map(from_adapter, adapters),
    )


def from_output(output: RequestOutput) -> scheduler_pb2.SchedulerServiceGenerateResponse:
    """Returns the message of an output without an error."""
    return scheduler_pb2.SchedulerServiceGenerateResponse(
        token_ids=output.token_ids,
        logprobs=_join(output.logprobs) if output.logprobs else None,
        finish_reason=_finish_reason(output),
        stop_token_id=output.stop_token_id,
        usage=common_pb2.Usage(
            prompt_tokens=output.num_prompt_tokens,
            completion_tokens=output.num_output_tokens,
            cached_tokens=output.num_cached_tokens,
        ),
        vector=output.vector,
        prompt_logprobs=output.prompt_logprobs,
        weights_version=output.weights_version,
    )


def from_outputs(outputs_by_id: Mapping[int, RequestOutput]) -> scheduler_link_pb2.SchedulerLinkServiceConnectResponse:
    """Returns the outputs of a tokenizer service's requests as columns."""
    outputs = outputs_by_id.values()
    response = scheduler_link_pb2.SchedulerLinkServiceConnectResponse(
        request_ids=outputs_by_id,
        num_tokens=[len(output.token_ids) for output in outputs],
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        finish_reasons=[output.finish_reason or 0 for output in outputs],  # type: ignore[misc]
        cached_tokens=[output.num_cached_tokens for output in outputs],
    )
    for i, output in enumerate(outputs):
        if output.weights_version:
            response.weights_versions[i] = output.weights_version
        if output.logprobs:
            response.logprobs[i].CopyFrom(_join(output.logprobs))
        if output.prompt_logprobs is not None:
            response.prompt_logprobs[i].CopyFrom(output.prompt_logprobs)
        if output.finish_reason is None:
            continue
        if output.stop_token_id is not None:
            response.stop_token_ids[i] = output.stop_token_id
        if output.vector is not None:
            response.vectors[i].CopyFrom(output.vector)
        if output.error is not None:
            response.errors[i].CopyFrom(output.error.to_message())
    return response


def _finish_reason(output: RequestOutput) -> common_pb2.FinishReason:
    return output.finish_reason or common_pb2.FINISH_REASON_UNSPECIFIED  # type: ignore[return-value]


def first_logprobs(logprobs: common_pb2.Logprobs, num_tokens: int) -> common_pb2.Logprobs:
    """Returns the log probabilities of the first `num_tokens` tokens, or of all if there are fewer."""
    if len(logprobs.ranks) <= num_tokens:
        return logprobs
    num_entries = num_tokens * logprobs.entries_per_token
    return common_pb2.Logprobs(
        entries_per_token=logprobs.entries_per_token,
        token_ids=logprobs.token_ids[:num_entries],
        logprobs=logprobs.logprobs[:num_entries],
        ranks=logprobs.ranks[:num_tokens],
    )


def _join(logprobs: Sequence[common_pb2.Logprobs]) -> common_pb2.Logprobs:
    """Merges the log probabilities of consecutive tokens, at least one, into one message."""
    joined = common_pb2.Logprobs()
    joined.CopyFrom(logprobs[0])
    for more in logprobs[1:]:
        joined.token_ids.extend(more.token_ids)
        joined.logprobs.extend(more.logprobs)
        joined.ranks.extend(more.ranks)
    return joined


# -- executor --------------------------------------------------------------------------------------------------------


def to_executor_info(message: executor_pb2.DescribeResponse) -> ExecutorInfo:
    model = message.model_info
    return ExecutorInfo(
        incarnation=message.incarnation,
        model=model.model,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        max_logprobs=model.max_logprobs,
        kv_groups=tuple(
            KVGroup(one.num_blocks, one.window, one.state_tokens, one.block_bytes) for one in message.kv_groups
        ),
        block_size=message.block_size,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_draft_tokens=message.max_draft_tokens,
        kind=model.kind,
        labels=tuple(model.labels),
        vector_size=model.vector_size,
        whole_prompts=message.whole_prompts,
        weights=to_weights(message.weights),
        predecessor_failed=message.predecessor_failed,
        pipeline_stages=max(1, message.pipeline_stages),
        num_ranks=max(1, message.num_ranks),
        decode_costs=tuple((cost.num_tokens, cost.seconds) for cost in message.decode_costs),
        draft_methods=tuple(
            DraftMethod(one.name, tuple((cost.num_tokens, cost.seconds) for cost in one.rounds), one.comes_later)
            for one in message.draft_methods
        ),
        draft_bounds=tuple((bound.num_requests, bound.max_draft_tokens) for bound in message.draft_bounds),
        max_adapters=message.max_adapters,
        adapters=tuple(map(to_adapter, message.adapters)),
        kv_tiers=tuple(message.kv_tiers),
        kv_format=message.kv_format,
        adapter_directory=message.adapter_directory,
        found_adapters=tuple(
            FoundAdapter(one.name, one.path, one.digest, one.problem, one.changed_at) for one in message.found_adapters
        ),
        role=_ROLES.get(message.role, "both"),
        reset_at=message.reset_at,
    )


def to_adapter(message: common_pb2.Adapter) -> Adapter:
    return Adapter(message.name, message.path, message.digest, message.rank, message.base_model, message.number)


def from_adapter(adapter: Adapter) -> common_pb2.Adapter:
    return common_pb2.Adapter(
        name=adapter.name,
        path=adapter.path,
        digest=adapter.digest,
        rank=adapter.rank,
        base_model=adapter.base_model,
        number=adapter.number,
        problem=adapter.problem,
    )


def to_weights(message: executor_pb2.Weights) -> Weights:
    return Weights(message.version, message.number, message.model, message.revision, message.digest)


def from_weights(weights: Weights) -> executor_pb2.Weights:
    return executor_pb2.Weights(
        version=weights.version,
        number=weights.number,
        model=weights.model,
        revision=weights.revision,
        digest=weights.digest,
    )


def from_new_request(new: NewRequest) -> executor_pb2.NewRequest:
    return executor_pb2.NewRequest(
        request_id=new.request_id,
        token_ids=new.token_ids,
        num_prompt_tokens=new.num_prompt_tokens,
        num_computed_tokens=new.num_computed_tokens,
        blocks=[executor_pb2.Blocks(first=blocks.first, ids=blocks.ids) for blocks in new.blocks],
        sampling_params=new.sampling_params,
        yields_vector=new.yields_vector,
        second_text_start=new.second_text_start,
        draft_domain=new.draft_domain,
        adapter_slot=new.adapter_slot,
        images=new.images.from_token(new.num_computed_tokens),
    )


def from_step(step: ScheduledStep, traces: Sequence[Trace] = ()) -> executor_pb2.StepRequest:
    """Returns the message of a step. traces: parallel to step.new_requests; empty if none of them is traced."""
    message = executor_pb2.StepRequest(
        step_id=step.step_id,
        request_ids=step.request_ids,
        num_scheduled_tokens=step.num_scheduled_tokens,
        num_new_blocks=step.num_new_blocks,
        new_block_ids=step.new_block_ids,
        finished_request_ids=step.finished_request_ids,
    )
    for slot, digest in step.adapter_slots:
        message.adapter_slots.add(slot=slot, digest=digest)
    if step.tiers is not None:
        message.MergeFrom(step.tiers)
    if step.drafts_of:
        by_id = {step.sampled[i].request_id: num_drafts for i, num_drafts in step.drafts_of.items()}
        message.num_draft_tokens.extend(by_id.get(request_id, 0) for request_id in step.request_ids)
        if step.draft_methods:
            message.draft_methods.extend(step.draft_methods.get(request_id, 0) for request_id in step.request_ids)
    if step.new_requests:
        message.new_requests.extend(map(from_new_request, step.new_requests))
        if any(one.traceparent for one in traces):
            message.traceparents.extend(one.traceparent for one in traces)
        if any(one.tracestate for one in traces):
            message.tracestates.extend(one.tracestate for one in traces)
    return message


def to_step_result(message: executor_pb2.StepResult) -> StepResult:
    return StepResult(
        message.step_id,
        message.request_ids[:],
        message.num_tokens[:],
        message.token_ids[:],
        dict(message.logprobs) if message.logprobs else {},
        dict(message.vectors) if message.vectors else {},
        dict(message.errors) if message.errors else {},
        dict(message.prompt_logprobs) if message.prompt_logprobs else {},
        message.num_drafted[:],
        tuple(message.loaded) if message.loaded else (),
    )


def to_step_clock(message: executor_pb2.StepResult) -> StepClock:
    return StepClock(
        execute_seconds=message.execute_ns / 1e9,
        queue_seconds=message.queue_ns / 1e9,
        idle_seconds=message.idle_ns / 1e9 if message.HasField("idle_ns") else None,
    )
