"""The outputs of a call. Each of several outputs of one prompt is a separate request, as gateways send them."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from pagewire.config.sampling_checks import check_num_values
from pagewire.config.sampling_params import seed_of_choice
from pagewire.errors import InvalidRequest
from pagewire.services.tokenizer.errors import invalid, invalid_request
from pagewire.services.tokenizer.generation.choices.counts import checked_count
from pagewire.services.tokenizer.generation.choices.search_requests import searched
from pagewire.services.tokenizer.generation.client_session import ClientSession
from pagewire.services.tokenizer.generation.text_generator import TextGenerator
from pagewire.services.tokenizer.output.text_output import TextDelta, merged
from pagewire.services.tokenizer.received import Received
from pagewire.v1 import inference_pb2
from pagewire.v1.common_pb2 import SamplingParams
from pagewire.wire.rpc import RpcError


async def generate(
    generator: TextGenerator, received: Received
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    """Yields the n outputs of a request as they are generated; for best_of and beam search, the best ones when
    all have ended.

    Raises RpcError.
    """
    request = received.request
    try:
        check_num_values(received.given, max(request.n, request.best_of))
    except InvalidRequest as error:
        raise invalid_request(error) from error
    if request.HasField("beam_search"):
        for response in await searched(generator, received):
            yield response
        return
    n, best_of = _counts(request)
    if best_of == n:
        async with aclosing(_all(generator, received, n)) as responses:
            async for response in responses:
                yield response
        return
    for response in await _best(generator, received, n, best_of):
        yield response


def _counts(request: inference_pb2.GenerateRequest) -> tuple[int, int]:
    """Returns n and best_of. Raises RpcError (INVALID_ARGUMENT)."""
    n = checked_count("n", request.n or 1)
    best_of = checked_count("best_of", request.best_of or n)
    if best_of < n:
        raise invalid(f"best_of is {best_of}, less than n, which is {n}; raise best_of or lower n", "best_of")
    return n, best_of


async def _all(
    generator: TextGenerator, received: Received, count: int
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    session = ClientSession(generator)
    try:
        for index, one in enumerate(_single(received, count)):
            session.start(index, one)
        async for outputs in session.outbox:
            for number, output in outputs.items():
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


def _single(received: Received, count: int) -> list[Received]:
    """Returns a request for each output. They share the message, with its prompt."""
    received.request.ClearField("n")
    received.request.ClearField("best_of")
    if count == 1:
        return [received]
    seed = received.given.seed if received.given.HasField("seed") else secrets.randbits(63)
    choices = []
    for index in range(count):
        given = SamplingParams()
        given.CopyFrom(received.given)
        given.seed = seed_of_choice(seed, index)
        if index:  # the first choice reports the prompt for all
            given.ClearField("prompt_logprobs")
        # All are admitted or refused with the first.
        choices.append(replace(received, given=given, resubmitted=received.resubmitted or index > 0))
    return choices


async def _best(
    generator: TextGenerator, received: Received, n: int, best_of: int
) -> list[inference_pb2.GenerateResponse]:
    has_logprobs = received.given.HasField("logprobs")
    if not has_logprobs:
        received.given.logprobs = 0
    by_choice: list[list[inference_pb2.GenerateResponse]] = [[] for _ in range(best_of)]
    async for response in _all(generator, received, best_of):
        by_choice[response.index].append(response)
    wholes = [merged(responses) for responses in by_choice]
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
    """Returns the criterion of OpenAI's API. A sum, which vLLM used, would favor short outputs."""
    return sum(token.logprob for token in output.logprobs) / max(1, len(output.logprobs))
