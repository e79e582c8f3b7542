"""Several outputs of one prompt: each is a request of its own, as gateways send them."""

import secrets
from collections.abc import AsyncGenerator

from pagewire.config.sampling_params import MAX_CHOICES, seed_of_choice
from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.generation.client_session import ClientSession
from pagewire.services.tokenizer.generation.text_generator import TextGenerator
from pagewire.services.tokenizer.output.text_output import TextDelta, UnreadOutput
from pagewire.v1 import inference_pb2
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from pagewire.wire.rpc import RpcError


async def sampled(
    generator: TextGenerator, submission: GenerateSubmission
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    """What the request's n outputs say, as they are generated, or the n best of best_of when all have ended.

    Raises RpcError.
    """
    n, best_of = _counts(submission.request)
    if best_of == n:
        async for response in _all(generator, submission, n):
            yield response
        return
    for response in await _best(generator, submission, n, best_of):
        yield response


def _counts(request: inference_pb2.GenerateRequest) -> tuple[int, int]:
    """n and best_of. Raises RpcError (INVALID_ARGUMENT)."""
    n = num_outputs(request)
    best_of = _checked("best_of", request.best_of or n)
    if best_of < n:
        raise invalid(
            f"best_of is {best_of}, and n is {n}: so many cannot be chosen; raise best_of or lower n", "best_of"
        )
    return n, best_of


def num_outputs(request: inference_pb2.GenerateRequest) -> int:
    """That the request wants. Raises RpcError (INVALID_ARGUMENT)."""
    return _checked("n", request.n or 1)


def _checked(name: str, count: int) -> int:
    if not 1 <= count <= MAX_CHOICES:
        raise invalid(f"{name} is {count}; it must be within 1..{MAX_CHOICES}", name)
    return count


async def _all(
    generator: TextGenerator, submission: GenerateSubmission, count: int
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    session = ClientSession(generator)
    try:
        for index, one in enumerate(_single(submission, count)):
            session.start(index, one)
        async for outputs in session.outbox:
            for number, unread in outputs.items():
                output = unread.read()
                if isinstance(output, RpcError):
                    raise output
                response = output.response if isinstance(output, TextDelta) else output
                response.index = number or 0
                count -= bool(response.finish_reason)
                yield response
            if not count:
                return
    finally:
        session.close()


def _single(submission: GenerateSubmission, count: int) -> list[GenerateSubmission]:
    """For one output each."""
    request = submission.request
    request.ClearField("n")
    request.ClearField("best_of")
    if count == 1:
        return [submission]
    params = request.sampling_params
    seed = params.seed if params.HasField("seed") else secrets.randbits(63)
    submissions = []
    for index in range(count):
        one = GenerateSubmission()
        one.CopyFrom(submission)
        one.request.sampling_params.seed = seed_of_choice(seed, index)
        if index:  # the first one is told for all
            one.request.sampling_params.ClearField("prompt_logprobs")
            one.resubmitted = True  # all are let in or refused with the first
        submissions.append(one)
    return submissions


async def _best(
    generator: TextGenerator, submission: GenerateSubmission, n: int, best_of: int
) -> list[inference_pb2.GenerateResponse]:
    request = submission.request
    has_logprobs = request.sampling_params.HasField("logprobs")
    if not has_logprobs:
        request.sampling_params.logprobs = 0
    merged: dict[int, UnreadOutput] = {}
    async for response in _all(generator, submission, best_of):
        output = UnreadOutput(response)
        merged[response.index] = merged[response.index].merge(output) if response.index in merged else output
    wholes = [merged[index].read() for index in range(best_of)]
    outputs = [whole for whole in wholes if isinstance(whole, inference_pb2.GenerateResponse)]
    first = outputs[0]
    outputs.sort(key=_mean_logprob, reverse=True)
    if outputs[0] is not first and first.HasField("prompt_logprobs"):
        outputs[0].prompt_logprobs.CopyFrom(first.prompt_logprobs)
        first.ClearField("prompt_logprobs")
    outputs[0].usage.completion_tokens += sum(output.usage.completion_tokens for output in outputs[n:])
    for rank, best in enumerate(outputs[:n]):
        best.index = rank
        if not has_logprobs:
            best.ClearField("logprobs")
    return outputs[:n]


def _mean_logprob(output: inference_pb2.GenerateResponse) -> float:
    """What OpenAI's API chooses by; a sum, as vLLM's was, is in favor of short outputs."""
    return sum(token.logprob for token in output.logprobs) / max(1, len(output.logprobs))
