"""The public text-level API: reads messages, calls what does the work, writes messages."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import grpc

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.generation.text_generator import TextGenerator
from pagewire.services.tokenizer.pool.text_limit import Room
from pagewire.services.tokenizer.prompts.prompts import encode_prompt
from pagewire.services.tokenizer.received import Received
from pagewire.services.tokenizer.templates.chat_messages import check_chat
from pagewire.telemetry.trace import Trace
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire.v1.common_pb2 import RequestContext
from pagewire.wire import rpc, tenants
from pagewire.wire.request_seeds import fill_seed

# All outputs of a request, as they are generated. Raises RpcError.
Generate = Callable[[Received], AsyncGenerator[inference_pb2.GenerateResponse]]


class VectorCalls(Protocol):
    """The calls that return vectors. They raise RpcError."""

    async def embed(self, request: inference_pb2.EmbedRequest, trace: Trace) -> inference_pb2.EmbedResponse: ...
    async def classify(
        self, request: inference_pb2.ClassifyRequest, trace: Trace
    ) -> inference_pb2.ClassifyResponse: ...
    async def score(self, request: inference_pb2.ScoreRequest, trace: Trace) -> inference_pb2.ScoreResponse: ...


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        generator: TextGenerator,
        generate: Generate,
        vectors: VectorCalls,
        model: inference_pb2.Model,
        *,
        exposes_tokenizer: bool,
        seed: int | None = None,
    ) -> None:
        """model: what is known of it without the scheduler. exposes_tokenizer: GetTokenizerInfo answers. seed: that of
        the server, for requests without one."""
        self._seed = seed
        self._exposes_tokenizer = exposes_tokenizer
        self._generator = generator
        self._generate = generate
        self._vectors = vectors
        self._model = model

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        request_context = tenants.attach(tenants.present.get(), rpc.trace_of(context).attach_to(RequestContext()))
        rpc.set_timeout(request_context, context)
        fill_seed(request, self._seed)
        has_begun = False
        async with aclosing(self._generate(Received.of_call(request, request_context))) as responses:
            async for response in responses:
                if not has_begun:
                    response.request_id, has_begun = request.request_id, True
                yield response

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.EmbedResponse:
        return await self._vectors.embed(request, rpc.trace_of(context))

    async def Classify(
        self, request: inference_pb2.ClassifyRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ClassifyResponse:
        return await self._vectors.classify(request, rpc.trace_of(context))

    async def Score(
        self, request: inference_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ScoreResponse:
        return await self._vectors.score(request, rpc.trace_of(context))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        await self._generator.models.find(request.model)
        pool = self._generator.pool
        pool.check_room()
        # A client that counts tokens may have more than the model reads.
        room = Room(self._generator.max_model_len, counts=False)
        check_chat(request.chat)
        token_ids = (await encode_prompt(pool, request, room)).token_ids
        token_strs = await pool.vocabulary_entries(token_ids) if request.return_token_strs else []
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, token_strs=token_strs, max_model_len=self._generator.max_model_len
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        await self._generator.models.find(request.model)
        token_ids = list(request.token_ids)
        if token_ids and min(token_ids) < 0:
            raise invalid(f"token_ids contains {min(token_ids)}; ids are >= 0", "token_ids")
        self._generator.pool.check_room()
        text = await self._generator.pool.decode(token_ids, skip_special_tokens=request.skip_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    async def AbortRequests(
        self, request: inference_pb2.AbortRequestsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.AbortRequestsResponse:
        ids = None if request.all else frozenset(request.request_ids)
        num_aborted = self._generator.live.end_early(ids, tenants.caller_scope())
        return inference_pb2.AbortRequestsResponse(num_aborted=num_aborted)

    async def CountRequests(
        self, request: inference_pb2.CountRequestsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.CountRequestsResponse:
        live, link = self._generator.live, self._generator.link
        idle = 0.0 if live.num_live else time.monotonic() - link.used_at
        level = None if link.model_info is None else link.sleep_level
        return inference_pb2.CountRequestsResponse(num_requests=live.num_live, idle_seconds=idle, sleep_level=level)

    async def GetTokenizerInfo(
        self, request: inference_pb2.GetTokenizerInfoRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetTokenizerInfoResponse:
        if not self._exposes_tokenizer:
            raise rpc.RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the chat template is not exposed; start the server with --enable-tokenizer-info-endpoint",
            )
        codec = self._generator.pool.codec
        template, of_tools = codec.chat_template, codec.tool_chat_template
        return inference_pb2.GetTokenizerInfoResponse(
            chat_template=template,
            tool_chat_template=None if of_tools == template else of_tools,
            vocab_size=codec.tokenizer.backend.get_vocab_size(),
            special_tokens=codec.tokenizer.special_tokens,
            max_model_len=self._generator.max_model_len,
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        info, served = self._generator.link.model_info, self._generator.models
        adapters = {adapter.name: adapter for adapter in served.adapters}
        names, next_page_token = _page([*served.names, *adapters], request)
        answer = inference_pb2.ListModelsResponse(next_page_token=next_page_token)
        for name in names:
            model = answer.models.add(id=name)
            model.MergeFrom(self._model)
            if name in adapters:
                model.root, model.parent = adapters[name].path, served.names[0]
            model.max_model_len = self._generator.max_model_len
            model.has_chat_template = self._generator.pool.codec.chat_template is not None
            if info is not None:
                model.kind = info.kind
            model.default_sampling_params.CopyFrom(self._generator.defaults.params)
            model.default_sampling_source = self._generator.defaults.source
            model.sleep_level = self._generator.link.sleep_level
        return answer


def _page(names: Sequence[str], request: inference_pb2.ListModelsRequest) -> tuple[Sequence[str], str]:
    """Returns the names of a page, and the token of the next page. Raises RpcError (INVALID_ARGUMENT)."""
    if request.page_size < 0:
        raise invalid(f"page_size is {request.page_size}; it must be >= 0", "page_size")
    # A page token is the name that its page begins with.
    if request.page_token and request.page_token not in names:
        raise invalid("page_token is not one of these models' lists; begin again without one", "page_token")
    start = names.index(request.page_token) if request.page_token else 0
    end = start + request.page_size if request.page_size else len(names)
    return names[start:end], names[end] if end < len(names) else ""
