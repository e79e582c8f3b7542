"""Beam search by requests for one token each, with their beginnings in the prefix cache.

A search survives a restart of the scheduler or an executor, as the link submits its live requests again. If this
service dies, the search starts over and returns the same outputs.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc

from pagewire.config.sampling_checks import check_room, resolve
from pagewire.config.sampling_params import LENGTH_PENALTY
from pagewire.errors import InvalidRequest
from pagewire.services.tokenizer.errors import invalid, invalid_request
from pagewire.services.tokenizer.generation.choices.beam_search import BeamSearch, Continuations, Hypothesis
from pagewire.services.tokenizer.generation.choices.composed import composing
from pagewire.services.tokenizer.generation.choices.counts import checked_count
from pagewire.services.tokenizer.generation.text_generator import PreparedRequest, TextGenerator
from pagewire.services.tokenizer.output.text_output import TextOutput
from pagewire.services.tokenizer.prompts.prompts import Prompt
from pagewire.services.tokenizer.received import Received
from pagewire.services.tokenizer.record import Record, Unrecorded
from pagewire.services.tokenizer.scheduler_link import SubmittedRequest
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH

# Sampling parameters that change the probabilities of tokens, and their neutral values.
_REFUSED = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0}


async def searched(generator: TextGenerator, received: Received) -> list[inference_pb2.GenerateResponse]:
    """Returns the outputs that a beam search finds, each in one response, the best first. Raises RpcError."""
    _check(received.request)
    record = Record(received, generator.models.label(received.request.model))
    try:
        with composing(generator.live, received):
            responses = await _searched(generator, received, record)
    except asyncio.CancelledError:
        record.on_cancelled()
        raise
    except Exception as error:
        record.on_error(error)
        raise
    usage = common_pb2.Usage()
    usage.CopyFrom(responses[0].usage)
    usage.completion_tokens = sum(response.usage.completion_tokens for response in responses)
    record.on_end(responses[0].finish_reason, usage)
    return responses


async def _searched(
    generator: TextGenerator, received: Received, record: Record
) -> list[inference_pb2.GenerateResponse]:
    prepared = await generator.prepare(received, record.span)
    info = await generator.link.wait_for_model()
    search, num_logprobs = _begin(info, prepared)
    steps = _Steps(generator, prepared, num_logprobs, record.span.trace)
    record.on_submitted()
    while search.running:
        continuations = await steps.continuations(search.running)
        if len(steps.weights_versions) > 1:  # weights were replaced: probabilities of old and new are not comparable
            steps.weights_versions.clear()
            search, _ = _begin(info, prepared)
        else:
            search.advance(continuations)
    responses = []
    for index, output in enumerate(search.outputs):
        response = _response(generator, prepared, output)
        response.usage.cached_tokens = steps.num_cached_tokens
        response.index = index
        response.weights_version = min(steps.weights_versions, default="")
        responses.append(response)
    return responses


def _check(request: inference_pb2.GenerateRequest) -> None:
    """Raises RpcError (INVALID_ARGUMENT), naming what beam search does not support."""
    params = request.sampling_params
    given = [name for name, value in _REFUSED.items() if getattr(params, name) not in (0, value)]
    given += [name for name in ("logit_bias_ids", "allowed_token_ids", "bad_words") if len(getattr(params, name))]
    given += [name for name in ("grammar", "prompt_logprobs") if params.HasField(name)]  # type: ignore[arg-type]
    given += [name for name in ("stop", "bad_words") if len(getattr(request, name))]
    if request.HasField("thinking_token_budget"):
        given.append("thinking_token_budget")
    if request.output_parsing.WhichOneof("forced"):
        given.append("tool_choice (required, or a tool's name)")
    if given:
        # The field at fault comes first, so that each API can report it by its own name.
        field = given[0].partition(" ")[0]
        raise invalid(f"{', '.join(given)} cannot be combined with beam search; leave out one of them", field)
    if request.best_of:
        raise invalid("beam search returns the best of all outputs; leave out best_of", "best_of")


def _begin(info: common_pb2.ModelInfo, prepared: PreparedRequest) -> tuple[BeamSearch, int]:
    """Returns the search, and how many log probabilities each of its steps needs. Raises RpcError."""
    request, params = prepared.received.request, prepared.params
    try:
        resolve(params)
        clamps = prepared.received.clamps(params)
        check_room(params, len(prepared.prompt.token_ids), info.max_model_len, clamps=clamps)
    except InvalidRequest as error:
        raise invalid_request(error) from error
    penalty = request.beam_search.length_penalty if request.beam_search.HasField("length_penalty") else 1.0
    if penalty not in LENGTH_PENALTY:
        raise invalid(f"length_penalty is {penalty:g}; it must be {LENGTH_PENALTY}", "beam_search.length_penalty")
    if prepared.prompt.images:
        raise invalid("images cannot be combined with beam search; leave out one of them")
    if params.HasField("grammar"):
        raise invalid(
            "a grammar, which tools with strict: true have, cannot be combined with beam search; leave out one of them"
        )
    width = checked_count("n", request.n or 1)
    end_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else info.eos_token_ids)}
    # The scheduler refuses a prompt that leaves no room.
    room = max(1, info.max_model_len - len(prepared.prompt.token_ids))
    search = BeamSearch(
        width,
        end_token_ids,
        min(params.max_tokens, room) if params.HasField("max_tokens") else room,
        penalty,
        request.beam_search.early_stopping,
    )
    if search.num_continuations > info.max_logprobs:
        raise invalid(
            f"beam search over n = {width} outputs with {len(end_token_ids)} end tokens needs the "
            f"{search.num_continuations} most probable tokens, and this model returns at most {info.max_logprobs}: "
            "lower n, or raise the executor's --max-logprobs"
        )
    return search, max(search.num_continuations, params.logprobs)


class _Steps:
    """Computes the next tokens of beginnings, with one request for each."""

    def __init__(
        self,
        generator: TextGenerator,
        prepared: PreparedRequest,
        num_logprobs: int,
        trace: Trace,
    ) -> None:
        self._generator = generator
        self._prepared = prepared
        self._prompt_token_ids = list(prepared.prompt.token_ids)
        self._params = common_pb2.SamplingParams(
            temperature=1, max_tokens=1, seed=0, logprobs=num_logprobs, priority=prepared.params.priority
        )
        self._trace = trace
        self.num_cached_tokens = 0  # of the prompt, in the first step
        self.weights_versions: set[str] = set()  # of the weights that have answered
        self._has_begun = False

    async def continuations(self, hypotheses: Sequence[Hypothesis]) -> list[Continuations]:
        """Returns the most probable next tokens of each. Raises RpcError."""
        asked = [_NextToken() for _ in hypotheses]
        submitted: list[SubmittedRequest] = []
        # The search was admitted with its first token.
        received = self._prepared.received
        received = replace(received, resubmitted=received.resubmitted or self._has_begun)
        try:
            for hypothesis, next_token in zip(hypotheses, asked, strict=True):
                prompt = Prompt(self._prompt_token_ids + hypothesis.token_ids)
                prepared = replace(self._prepared, received=received, params=self._params, prompt=prompt)
                submitted.append(self._generator.submit(prepared, next_token, self._trace))
            answers = await asyncio.gather(*(next_token.answer for next_token in asked))
        except BaseException:
            for one in submitted:
                self._generator.link.abort(one)
            raise
        self.weights_versions |= {next_token.weights_version for next_token in asked}
        if not self._has_begun:
            self._has_begun, self.num_cached_tokens = True, asked[0].num_cached_tokens
        return answers


class _NextToken:
    """A TokenListener that receives the most probable tokens from a request for one token."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Continuations] = asyncio.get_running_loop().create_future()
        self.num_cached_tokens = 0
        self.weights_version = ""

    def on_weights(self, version: str) -> None:
        self.weights_version = version

    def on_tokens(
        self,
        token_ids: Sequence[int],
        finish_reason: common_pb2.FinishReason,
        cached_tokens: int,
        stop_token_id: int | None,
        logprobs: common_pb2.Logprobs | None,
    ) -> None:
        self.num_cached_tokens = cached_tokens
        if self.answer.done():
            return
        if logprobs is None:  # the request was ended by its id
            self.answer.set_exception(RpcError(grpc.StatusCode.ABORTED, "the request was ended by its id"))
            return
        # The first entry is the sampled token. It is repeated among the others if it is one of the most probable.
        self.answer.set_result(list(zip(logprobs.token_ids[1:], logprobs.logprobs[1:], strict=True)))

    def on_prompt_logprobs(self, logprobs: common_pb2.Logprobs) -> None:
        raise ValueError("the scheduler returned log probabilities of a prompt, which were not requested")

    def on_vector(self, vector: common_pb2.Vector) -> None:
        raise ValueError("the scheduler returned a vector for a request for a token")

    def on_error(self, error: RpcError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def _response(
    generator: TextGenerator,
    prepared: PreparedRequest,
    output: Hypothesis,
) -> inference_pb2.GenerateResponse:
    """Returns the output as if a request had sampled it."""
    said: list[TextOutput] = []
    stream = generator.open(prepared, said.append, Unrecorded())
    params, last = prepared.params, output.token_id
    info = generator.link.model_info
    ends = last in params.stop_token_ids or (not params.ignore_eos and info is not None and last in info.eos_token_ids)
    stream.on_tokens(
        output.token_ids,
        STOP if ends else LENGTH,
        0,
        last if last in params.stop_token_ids else None,
        _logprobs(output, params.logprobs) if params.HasField("logprobs") else None,
    )
    (response,) = said
    assert isinstance(response, inference_pb2.GenerateResponse)
    return response


def _logprobs(output: Hypothesis, num_top: int) -> common_pb2.Logprobs:
    columns = common_pb2.Logprobs(entries_per_token=1 + num_top)
    for one in output.tokens():
        entries = [(one.token_id, one.token_logprob), *one.alternatives[:num_top]]
        columns.token_ids.extend(token_id for token_id, _ in entries)
        columns.logprobs.extend(logprob for _, logprob in entries)
        columns.ranks.append(1 + sum(logprob > one.token_logprob for _, logprob in one.alternatives))
    return columns
