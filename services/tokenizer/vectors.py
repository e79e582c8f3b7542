"""Embed, Classify and Score: texts become tokens, each text a request of its own, and their vectors the answer.

Requests travel over the same link as those for text: if the scheduler dies, they are submitted again.
"""

import asyncio
import math
from collections.abc import Sequence

import grpc

from pagewire.rpc import MAX_MESSAGE_BYTES, RpcError
from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.input_encoding import EncodedInput
from pagewire.services.tokenizer.model_kind import wrong_kind
from pagewire.services.tokenizer.scheduler_link import SubmittedRequest
from pagewire.services.tokenizer.text_generator import TextGenerator
from pagewire.telemetry import Span
from pagewire.v1 import common_pb2, inference_pb2, scheduler_pb2

EMBED, CLASSIFY = common_pb2.MODEL_KIND_EMBED, common_pb2.MODEL_KIND_CLASSIFY
# Texts that one worker of the pool encodes in a row.
TEXTS_PER_CALL = 32
MAX_INPUTS = 65_536
# Of one call, at the scheduler at once. More would keep no executor busier; and the scheduler takes 70 microseconds for
# each, in which nobody else's steps are decided.
MAX_IN_FLIGHT = 1024
# Of an answer's numbers: beside what frames them, and numbers of tokens, they fit into a message.
MAX_VECTOR_BYTES = MAX_MESSAGE_BYTES - 32 * MAX_INPUTS

Inputs = Sequence[inference_pb2.InputText]


class _VectorListener:
    """Resolves a future; it is a TokenListener."""

    def __init__(self) -> None:
        self.vector: asyncio.Future[common_pb2.Vector] = asyncio.get_running_loop().create_future()

    def on_tokens(
        self,
        token_ids: Sequence[int],
        finish_reason: common_pb2.FinishReason,
        cached_tokens: int,
        stop_token_id: int | None,
        logprobs: common_pb2.Logprobs | None,
    ) -> None:
        if finish_reason:  # aborted by its external id
            self.on_error(RpcError(grpc.StatusCode.CANCELLED, "the request was aborted"))

    def on_vector(self, vector: common_pb2.Vector) -> None:
        if not self.vector.done():
            self.vector.set_result(vector)

    def on_error(self, error: RpcError) -> None:
        if not self.vector.done():
            self.vector.set_exception(error)


class Vectors:
    """The calls. They raise RpcError."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator

    async def embed(self, request: inference_pb2.EmbedRequest, traceparent: str) -> inference_pb2.EmbedResponse:
        info = self._check(request.model, request.inputs, EMBED, "inputs")
        num_wanted = info.vector_size
        if request.HasField("dimensions"):
            num_wanted = request.dimensions
            if not 1 <= num_wanted <= info.vector_size:
                raise invalid(f"dimensions is {num_wanted}; the model's vectors have {info.vector_size}")
        _check_size(len(request.inputs), num_wanted, "inputs")
        prefix = self._prompt(request.prompt_name if request.HasField("prompt_name") else None)
        encoded = await self._encode(request.inputs, request.options, info, "inputs", prefix)
        vectors = await self._vectors("tokenizer.embed", encoded, request.request_id, traceparent)
        if num_wanted < info.vector_size:
            vectors = [_shortened(vector, num_wanted) for vector in vectors]
        return inference_pb2.EmbedResponse(embeddings=vectors, num_tokens=[len(ids) for ids, _ in encoded])

    async def classify(
        self, request: inference_pb2.ClassifyRequest, traceparent: str
    ) -> inference_pb2.ClassifyResponse:
        info = self._check(request.model, request.inputs, CLASSIFY, "inputs")
        _check_size(len(request.inputs), info.vector_size, "inputs")
        encoded = await self._encode(request.inputs, request.options, info, "inputs")
        scores = await self._vectors("tokenizer.classify", encoded, request.request_id, traceparent)
        return inference_pb2.ClassifyResponse(
            scores=scores, num_tokens=[len(ids) for ids, _ in encoded], labels=info.labels
        )

    async def score(self, request: inference_pb2.ScoreRequest, traceparent: str) -> inference_pb2.ScoreResponse:
        info = self._check(request.model, request.pairs, CLASSIFY, "pairs")
        if len(info.labels) != 1:
            raise invalid(f"the model has {len(info.labels)} labels, and Score is for one: call Classify")
        for index, pair in enumerate(request.pairs):
            if not pair.HasField("text_pair"):
                raise invalid(f"pairs[{index}] has no text_pair")
        encoded = await self._encode(request.pairs, request.options, info, "pairs")
        scores = await self._vectors("tokenizer.score", encoded, request.request_id, traceparent)
        return inference_pb2.ScoreResponse(
            scores=[vector.values[0] for vector in scores], num_tokens=[len(ids) for ids, _ in encoded]
        )

    def _check(self, model: str, inputs: Inputs, kind: int, name: str) -> common_pb2.ModelInfo:
        self._generator.check_model(model)
        info = self._generator.link.model_info
        if info is None:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the model is not loaded yet; try again later")
        if info.kind != kind:
            raise wrong_kind(info)
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise invalid(f"{name} has {len(inputs)} entries; 1 to {MAX_INPUTS} are possible")
        return info

    def _prompt(self, name: str | None) -> str:
        config = self._generator.pool.codec.sentence_config
        if name is not None and name not in config.prompts:
            raise invalid(
                f"prompt_name {name!r} is not one of the model's: {', '.join(config.prompts) or 'it has none'}"
            )
        name = config.default_prompt_name if name is None else name
        return config.prompts[name] if name else ""

    async def _encode(
        self,
        inputs: Inputs,
        options: inference_pb2.InputOptions,
        info: common_pb2.ModelInfo,
        name: str,
        prefix: str = "",
    ) -> list[EncodedInput]:
        """name: of the field, for errors."""
        max_tokens = _max_tokens(options, info)
        texts: list[tuple[str, str | None]] = []
        for index, given in enumerate(inputs):
            kind = given.WhichOneof("input")
            if kind is None or (kind == "token_ids" and given.HasField("text_pair")):
                raise invalid(f"{name}[{index}] must have text, alone or with text_pair, or token_ids")
            if kind == "text":
                texts.append((prefix + given.text, given.text_pair if given.HasField("text_pair") else None))
        add_special_tokens = options.add_special_tokens if options.HasField("add_special_tokens") else True
        parts = [texts[start : start + TEXTS_PER_CALL] for start in range(0, len(texts), TEXTS_PER_CALL)]
        pool = self._generator.pool
        try:
            of_parts = await asyncio.gather(
                *(
                    pool.encode_inputs(part, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
                    for part in parts
                )
            )
        except ValueError as error:
            raise invalid(str(error)) from error
        of_texts = iter([encoded for part in of_parts for encoded in part])
        encoded = [
            next(of_texts) if given.WhichOneof("input") == "text" else (list(given.token_ids.ids)[:max_tokens], 0)
            for given in inputs
        ]
        for index, (token_ids, _) in enumerate(encoded):
            if not token_ids:
                raise invalid(f"{name}[{index}] has no tokens; it must have at least one")
            if len(token_ids) > info.max_model_len:
                raise invalid(
                    f"{name}[{index}] has {len(token_ids)} tokens, the model takes {info.max_model_len}; shorten it, "
                    "or set truncate_prompt_tokens"
                )
        return encoded

    async def _vectors(
        self, name: str, encoded: Sequence[EncodedInput], external_id: str, traceparent: str
    ) -> list[common_pb2.Vector]:
        """In order. If one fails, or nobody waits any more, all end."""
        span = Span(name, traceparent, serves=True)
        link, listeners = self._generator.link, [_VectorListener() for _ in encoded]
        requests = [
            SubmittedRequest(
                scheduler_pb2.TokenRequest(
                    prompt_token_ids=token_ids,
                    traceparent=span.traceparent,
                    external_id=external_id,
                    yields_vector=True,
                    second_text_start=second_text_start,
                ),
                listener,
            )
            for (token_ids, second_text_start), listener in zip(encoded, listeners, strict=True)
        ]
        try:
            for index, request in enumerate(requests):
                if index >= MAX_IN_FLIGHT:
                    await listeners[index - MAX_IN_FLIGHT].vector
                link.submit(request)
            vectors = await asyncio.gather(*(listener.vector for listener in listeners))
        except BaseException as error:
            span.end(error=str(error) or type(error).__name__)
            raise
        else:
            span.end({"pagewire.prompt_tokens": sum(len(token_ids) for token_ids, _ in encoded)})
            return list(vectors)
        finally:
            for request, listener in zip(requests, listeners, strict=True):
                link.abort(request)
                if listener.vector.done() and not listener.vector.cancelled():
                    listener.vector.exception()  # of several that failed, one was told


def _check_size(num_inputs: int, vector_size: int, name: str) -> None:
    """Before all is computed that cannot be sent. Raises RpcError (INVALID_ARGUMENT)."""
    most = MAX_VECTOR_BYTES // (4 * vector_size)
    if num_inputs > most:
        raise invalid(
            f"{name} has {num_inputs} entries; one answer holds {most} vectors of {vector_size} numbers: call again "
            "for the others"
        )


def _max_tokens(options: inference_pb2.InputOptions, info: common_pb2.ModelInfo) -> int | None:
    if not options.HasField("truncate_prompt_tokens"):
        return None
    wanted = options.truncate_prompt_tokens
    if wanted == -1:
        return info.max_model_len
    if not 1 <= wanted <= info.max_model_len:
        raise invalid(f"truncate_prompt_tokens is {wanted}; it must be -1 or within 1..{info.max_model_len}")
    return wanted


def _shortened(vector: common_pb2.Vector, size: int) -> common_pb2.Vector:
    """The first numbers; of length 1 if the whole vector was."""
    values = vector.values[:size]
    if abs(math.hypot(*vector.values) - 1) < 1e-3 and (length := math.hypot(*values)) > 0:
        values = [value / length for value in values]
    return common_pb2.Vector(values=values)
