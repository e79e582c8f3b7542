"""The calls Embed, Classify and Score. Each text is a separate request to the scheduler, which returns its vector.

The requests travel over the same link as those for text: if the scheduler dies, they are submitted again.
"""

import asyncio
import math
from collections.abc import Sequence
from operator import mul
from typing import Any

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.generation.text_generator import TextGenerator
from pagewire.services.tokenizer.pool.input_encoding import Cuts, EncodedInput
from pagewire.services.tokenizer.pool.model_kind import wrong_kind
from pagewire.services.tokenizer.vectors.vector_batch import VectorBatch
from pagewire.services.tokenizer.vectors.vector_inputs import Inputs, Name, encode, whole_cut
from pagewire.telemetry import semconv
from pagewire.telemetry.spans import Span
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.v1.scheduler_pb2 import TokenRequest
from pagewire.wire import tenants
from pagewire.wire.rpc import MAX_MESSAGE_BYTES, RpcError

EMBED, CLASSIFY = common_pb2.MODEL_KIND_EMBED, common_pb2.MODEL_KIND_CLASSIFY
MAX_INPUTS = 65_536
# The limit of the numbers of an answer, which fit into a message along with its other fields.
MAX_VECTOR_BYTES = MAX_MESSAGE_BYTES - 32 * MAX_INPUTS


class _Call:
    """The properties of one call."""

    def __init__(self, name: str, options: inference_pb2.InputOptions, external_id: str, trace: Trace) -> None:
        """name: the call's, in lower case."""
        self.rpc_method = f"pagewire.v1.InferenceService/{name.capitalize()}"
        self.options = options
        self.external_id = external_id
        self.trace = trace

    def attributes(self, code: str) -> dict[str, Any]:
        """Returns the attributes of its span. code: that of its gRPC status."""
        return {semconv.RPC_SYSTEM: "grpc", semconv.RPC_METHOD: self.rpc_method, semconv.RPC_STATUS: code}

    def name_of(self, field: str) -> Name:
        """Returns the name, in errors, of an input of the field."""
        return lambda index: f"{field}[{self.options.first_index + index}]"


class _Distinct:
    """The texts of one side of the pairs, each once."""

    def __init__(self, texts: Sequence[str], name: Name) -> None:
        places: dict[str, int] = {}
        self.uses = [places.setdefault(text, len(places)) for text in texts]  # by pair: index into inputs
        self.inputs = [inference_pb2.InputText(text=text) for text in places]
        self._name = name

    def name(self, index: int) -> str:
        return self._name(self.uses.index(index))


class Vectors:
    """Implements the calls. They raise RpcError."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator

    async def embed(self, request: inference_pb2.EmbedRequest, trace: Trace) -> inference_pb2.EmbedResponse:
        info = await self._check(request.model, request.inputs, (EMBED,), "inputs")
        num_wanted = info.vector_size
        if request.HasField("dimensions"):
            num_wanted = request.dimensions
            if not 1 <= num_wanted <= info.vector_size:
                raise invalid(f"dimensions is {num_wanted}; the model's vectors have {info.vector_size}", "dimensions")
        _check_size(len(request.inputs), num_wanted, "inputs")
        call = _Call("embed", request.options, request.request_id, trace)
        name = request.prompt_name if request.HasField("prompt_name") else None
        prefix = self._prompt(name, request.preferred_prompt_names)
        encoded = await self._encode(call, request.inputs, info, call.name_of("inputs"), prefix)
        vectors = await self._vectors(call, encoded)
        if num_wanted < info.vector_size:
            vectors = [_shortened(vector, num_wanted) for vector in vectors]
        return inference_pb2.EmbedResponse(
            embeddings=vectors, num_tokens=[len(ids) for ids, _ in encoded], request_id=request.request_id
        )

    async def classify(self, request: inference_pb2.ClassifyRequest, trace: Trace) -> inference_pb2.ClassifyResponse:
        info = await self._check(request.model, request.inputs, (CLASSIFY,), "inputs")
        _check_size(len(request.inputs), info.vector_size, "inputs")
        call = _Call("classify", request.options, request.request_id, trace)
        encoded = await self._encode(call, request.inputs, info, call.name_of("inputs"))
        scores = await self._vectors(call, encoded)
        return inference_pb2.ClassifyResponse(
            scores=scores,
            num_tokens=[len(ids) for ids, _ in encoded],
            labels=info.labels,
            request_id=request.request_id,
        )

    async def score(self, request: inference_pb2.ScoreRequest, trace: Trace) -> inference_pb2.ScoreResponse:
        info = await self._check(request.model, request.pairs, (CLASSIFY, EMBED), "pairs")
        call = _Call("score", request.options, request.request_id, trace)
        name = call.name_of("pairs")
        for index, pair in enumerate(request.pairs):
            if not (pair.HasField("text") and pair.HasField("text_pair")):
                raise invalid(f"{name(index)} must have text and text_pair", name(index))
        most = (request.max_tokens_per_query, request.max_tokens_per_doc)
        if min(most) < 0:
            raise invalid(
                f"max_tokens_per_query and max_tokens_per_doc are {most}; they must be at least 0",
                "max_tokens_per_query",
            )
        if info.kind == EMBED:
            return await self._similarities(call, request, info)
        if len(info.labels) != 1:
            raise invalid(
                f"the model has {len(info.labels)} labels, and Score needs one; call Classify (REST: /classify)"
            )
        encoded = await self._encode(call, request.pairs, info, name, most=most)
        scores = await self._vectors(call, encoded)
        return inference_pb2.ScoreResponse(
            scores=[vector.values[0] for vector in scores],
            num_tokens=[len(ids) for ids, _ in encoded],
            request_id=request.request_id,
        )

    async def _similarities(
        self, call: _Call, request: inference_pb2.ScoreRequest, info: common_pb2.ModelInfo
    ) -> inference_pb2.ScoreResponse:
        """Returns the cosine between the vectors of each pair's texts. A text of several pairs is computed once."""
        queries = _Distinct([pair.text for pair in request.pairs], call.name_of("pairs"))
        documents = _Distinct([pair.text_pair for pair in request.pairs], call.name_of("pairs"))
        encoded: list[EncodedInput] = []
        for side, most in ((queries, request.max_tokens_per_query), (documents, request.max_tokens_per_doc)):
            encoded += await self._encode(call, side.inputs, info, side.name, self._prompt(None), (most, 0))
        vectors = [_of_length_one(vector) for vector in await self._vectors(call, encoded)]
        scores, num_tokens = [], []
        for first, second in zip(queries.uses, documents.uses, strict=True):
            second += len(queries.inputs)
            scores.append(sum(map(mul, vectors[first], vectors[second])))
            num_tokens.append(len(encoded[first][0]) + len(encoded[second][0]))
            await asyncio.sleep(0)  # other requests get their turn: long vectors take 0.2 ms
        return inference_pb2.ScoreResponse(scores=scores, num_tokens=num_tokens, request_id=request.request_id)

    async def _check(self, model: str, inputs: Inputs, kinds: Sequence[int], field: str) -> common_pb2.ModelInfo:
        await self._generator.models.check_is_model(model)
        info = await self._generator.link.wait_for_model()
        if info.kind not in kinds:
            raise wrong_kind(info)
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise invalid(f"{field} has {len(inputs)} entries; 1 to {MAX_INPUTS} are possible", field)
        return info

    def _prompt(self, name: str | None, preferred: Sequence[str] = ()) -> str:
        config = self._generator.pool.codec.sentence_config
        if name is None:
            name = next((one for one in preferred if one in config.prompts), None)
        if name is not None and name not in config.prompts:
            raise invalid(
                f"prompt_name {name!r} is not one of the model's: {', '.join(config.prompts) or 'it has none'}",
                "prompt_name",
            )
        name = config.default_prompt_name if name is None else name
        return config.prompts[name] if name else ""

    async def _encode(
        self,
        call: _Call,
        inputs: Inputs,
        info: common_pb2.ModelInfo,
        name: Name,
        prefix: str = "",
        most: tuple[int, int] = (0, 0),
    ) -> list[EncodedInput]:
        """most: tokens that are kept of the first and the second text; 0: all."""
        whole = whole_cut(call.options, info)
        cuts = Cuts(whole, most[0] or None, most[1] or None, call.options.truncate_start, info.max_model_len)
        return await encode(self._generator.pool, inputs, call.options, info, name, prefix=prefix, cuts=cuts)

    async def _vectors(self, call: _Call, encoded: Sequence[EncodedInput]) -> list[common_pb2.Vector]:
        """Returns the vectors in order. If one fails, or the caller is cancelled, all end."""
        span = Span(call.rpc_method, call.trace, serves=True)
        context = tenants.attach(tenants.present.get(), span.trace.attach_to(common_pb2.RequestContext()))
        messages = [
            TokenSubmission(
                request=TokenRequest(
                    prompt_token_ids=token_ids,
                    external_id=call.external_id,
                    yields_vector=True,
                    second_text_start=second_text_start,
                    cache_salt=call.options.cache_salt,
                ),
                context=context,
            )
            for token_ids, second_text_start in encoded
        ]
        try:
            vectors = await VectorBatch(self._generator.link, messages, is_admitted=call.options.first_index > 0).run()
        except BaseException as error:
            code = error.code.name if isinstance(error, RpcError) else "CANCELLED"
            is_fault = code in semconv.FAULTS_OF_SERVERS
            attributes = call.attributes(code) | {semconv.ERROR_TYPE: code if is_fault else None}
            span.end(attributes, error=str(error) if is_fault else None)
            raise
        num_tokens = sum(len(token_ids) for token_ids, _ in encoded)
        span.end(call.attributes("OK") | {semconv.USAGE_INPUT_TOKENS: num_tokens})
        return vectors


def _check_size(num_inputs: int, vector_size: int, name: str) -> None:
    """Refuses a call with an answer that cannot be sent. Raises RpcError (INVALID_ARGUMENT)."""
    most = MAX_VECTOR_BYTES // (4 * vector_size)
    if num_inputs > most:
        raise invalid(
            f"{name} has {num_inputs} entries; one answer holds at most {most} vectors of {vector_size} numbers: call "
            "again for the others",
            name,
        )


def _shortened(vector: common_pb2.Vector, size: int) -> common_pb2.Vector:
    """Returns the first numbers, of length 1 if the whole vector was."""
    values = vector.values[:size]
    if abs(math.hypot(*vector.values) - 1) < 1e-3 and (length := math.hypot(*values)) > 0:
        values = [value / length for value in values]
    return common_pb2.Vector(values=values)


def _of_length_one(vector: common_pb2.Vector) -> list[float]:
    length = math.hypot(*vector.values) or 1.0
    return [value / length for value in vector.values]
