"""The tokens that the requests of a step gained, and the requests that ended with them."""

from dataclasses import dataclass, field
from typing import Any

from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult


@dataclass(slots=True)
class Outputs:
    """The columns of a step's result, for the requests that are still alive."""

    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)  # that each request gained, up to its end
    token_ids: list[int] = field(default_factory=list)  # [sum(num_tokens)]
    # Index into requests -> log probabilities of these tokens, and perhaps of some tokens after the end.
    logprobs: dict[int, Any] = field(default_factory=dict)
    # Index into requests -> log probabilities of its prompt.
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)
    # Index into requests -> the vector that a request ends with.
    vectors: dict[int, Any] = field(default_factory=dict)
    # Requests that ended with this step, and the reasons.
    ends: list[tuple[Request, FinishReason]] = field(default_factory=list)
    # Requests that the executor refused, with their errors.
    refused: list[tuple[Request, Any]] = field(default_factory=list)


def outcome(step: ScheduledStep, result: StepResult) -> Outputs:
    """Hands each request of the step the tokens that it gained, up to its end. Drops tokens of requests that have ended
    or were preempted since."""
    outputs = Outputs()
    if len(result.token_ids) == len(step.sampled) and not step.drafts_of:
        _append_one_each(step, result, outputs)
    else:
        _gain(step, result, outputs)
    if result.logprobs or result.prompt_logprobs:
        _attach_logprobs(step, result, outputs)
    if step.yielding:
        _end_with_vectors(step, result, outputs)
    return outputs


def _append_one_each(step: ScheduledStep, result: StepResult, outputs: Outputs) -> None:
    """Does the same as `_gain` when each request gains exactly one token, but faster."""
    alive, gained = outputs.requests, outputs.token_ids
    for request, epoch, token_id in zip(step.sampled, step.epochs, result.token_ids, strict=True):
        if request.epoch != epoch:
            continue
        request.num_output_placeholders -= 1
        request.token_ids.append(token_id)
        alive.append(request)
        gained.append(token_id)
        # `find_end` decides, but for most tokens no call is needed.
        if token_id in request.stop_token_ids or len(request.token_ids) >= request.max_num_tokens:
            reason = request.find_end()
            if reason is not None:
                outputs.ends.append((request, reason))
    outputs.num_tokens = [1] * len(alive)


def _gain(step: ScheduledStep, result: StepResult, outputs: Outputs) -> None:
    end = 0
    for i, request in enumerate(step.sampled):
        num_tokens = result.num_tokens[i]
        start, end = end, end + num_tokens
        if request.epoch != step.epochs[i]:
            continue
        token_ids, reason = request.gain(result.token_ids[start:end], 1 + step.drafts_of.get(i, 0))
        outputs.requests.append(request)
        outputs.num_tokens.append(len(token_ids))
        outputs.token_ids += token_ids
        if reason is not None:
            outputs.ends.append((request, reason))


def _attach_logprobs(step: ScheduledStep, result: StepResult, outputs: Outputs) -> None:
    index = {request.request_id: i for i, request in enumerate(outputs.requests)}
    for of_result, of_outputs in (
        (result.logprobs, outputs.logprobs),
        (result.prompt_logprobs, outputs.prompt_logprobs),
    ):
        for i, logprobs in of_result.items():
            if (j := index.get(step.sampled[i].request_id)) is not None:
                of_outputs[j] = logprobs


def _end_with_vectors(step: ScheduledStep, result: StepResult, outputs: Outputs) -> None:
    for i, (request, epoch) in enumerate(step.yielding, start=len(step.sampled)):
        if request.epoch == epoch:
            outputs.vectors[len(outputs.requests)] = result.vectors[i]
            outputs.requests.append(request)
            outputs.num_tokens.append(0)
            outputs.ends.append((request, FinishReason.STOP))
