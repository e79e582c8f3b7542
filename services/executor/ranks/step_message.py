"""Steps on the wire from the leader to the other ranks."""

from __future__ import annotations

from pagewire.services.executor.parallel.tokens import followers_sampling
from pagewire.services.executor.step.step import NewRequest, Step
from pagewire.services.executor.tiers.messages import loads_of, sets_of
from pagewire.services.executor.tiers.runner import TieredStep
from pagewire.v1 import common_pb2, executor_pb2


def step_to_proto(step: Step) -> executor_pb2.StepRequest:
    """Returns a valid step in the form that other ranks need: without values for sampling only, and without images of
    prompts that fail."""
    drafts = step.num_draft_tokens
    moves = step if isinstance(step, TieredStep) else None
    return executor_pb2.StepRequest(
        step_id=step.step_id,
        request_ids=step.request_ids,
        num_scheduled_tokens=step.num_scheduled_tokens.tolist(),
        num_new_blocks=step.num_new_blocks.ravel().tolist(),
        new_block_ids=step.new_block_ids.tolist(),
        finished_request_ids=step.finished_request_ids,
        new_requests=[_new_request_to_proto(request) for request in step.new_requests],
        num_draft_tokens=[] if drafts is None else drafts.tolist(),
        draft_methods=[] if step.draft_methods is None else step.draft_methods.tolist(),
        adapter_slots=[
            executor_pb2.AdapterSlot(slot=change.slot, digest=change.digest if change.adapter else "")
            for change in step.slot_changes
        ],
        saves=[] if moves is None else sets_of(moves.saves),
        loads=[] if moves is None else loads_of(moves),
    )


def _new_request_to_proto(request: NewRequest) -> executor_pb2.NewRequest:
    return executor_pb2.NewRequest(
        request_id=request.request_id,
        token_ids=request.token_ids.tolist(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        blocks=[executor_pb2.Blocks(first=blocks.first, ids=blocks.ids.tolist()) for blocks in request.blocks],
        sampling_params=followers_sampling(request.sampling),
        yields_vector=request.yields_vector,
        second_text_start=request.second_text_start,
        draft_domain=request.draft_domain,
        adapter_slot=request.adapter_slot,
        images=[
            common_pb2.PromptImage(
                hash=image.hash,
                offset=image.offset,
                num_tokens=image.num_tokens,
                tensors={
                    name: common_pb2.Tensor(dtype=str(tensor.dtype), shape=tensor.shape, data=tensor.tobytes())
                    for name, tensor in image.tensors.items()
                },
            )
            for image in request.images
        ],
    )
