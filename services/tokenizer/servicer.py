"""The public text-level contract: parse, call, convert."""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc

from pagewire import rpc
from pagewire.services.tokenizer.client_requests import ClientRequests
from pagewire.services.tokenizer.delivery import Delta
from pagewire.services.tokenizer.gateway_session import GatewaySession
from pagewire.services.tokenizer.prompts import encode_prompt
from pagewire.services.tokenizer.text_generator import TextGenerator
from pagewire.v1 import inference_pb2, inference_pb2_grpc

_ONLY = 0  # the number of a unary call's request


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, generator: TextGenerator, root: str) -> None:
        """root: name or path of the model that was loaded."""
        self._generator = generator
        self._root = root
        self._created = int(time.time())

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        requests = ClientRequests(self._generator)
        # Also runs when the call is cancelled while a response is being written.
        context.add_done_callback(lambda _: requests.abort_all())
        requests.start(_ONLY, request, rpc.traceparent_of(context))
        async for unread in requests.box:
            news = unread[_ONLY].read()
            if isinstance(news, rpc.RpcError):
                raise news
            response = news.response if isinstance(news, Delta) else news
            yield response
            if response.finish_reason:
                return

    async def Connect(
        self, request_iterator: AsyncIterator[inference_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.ConnectResponse]:
        session = GatewaySession(self._generator)
        context.add_done_callback(lambda _: session.close())
        reader = asyncio.create_task(session.read(request_iterator), name="gateway-reader")
        try:
            async for response in session.responses():
                yield response
            await reader
        finally:
            session.close()
            await rpc.cancel([reader])

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        self._generator.check_model(request.model)
        pool = self._generator.pool
        token_ids = await encode_prompt(pool, request)
        token_strs = await pool.vocabulary_entries(token_ids) if request.return_token_strs else []
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, token_strs=token_strs, max_model_len=self._generator.max_model_len
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        self._generator.check_model(request.model)
        token_ids = list(request.token_ids)
        if token_ids and min(token_ids) < 0:
            raise rpc.RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"token_ids contains {min(token_ids)}; ids are >= 0")
        text = await self._generator.pool.decode(token_ids, skip_special_tokens=request.skip_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    id=name,
                    root=self._root,
                    max_model_len=self._generator.max_model_len,
                    created=self._created,
                    has_chat_template=self._generator.pool.codec.chat_template is not None,
                )
                for name in self._generator.served_model_names
            ]
        )
