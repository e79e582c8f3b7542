"""An asynchronous Python client of the public text-level gRPC service."""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagewire.wire.generate_request import (
    GenerateOptions,
    Message,
    Prompt,
    generate_request,
    input_text,
    pair,
    tokenize_request,
)
from pagewire.wire.keys.header import metadata
from pagewire.wire.rpc import RpcError
from pagewire.wire.secure_rpc import client_channel
from pagewire.wire.tls import Files


class Client:
    """A client of a running stack: `async with Client("localhost:8001") as client: ...`.

    Every call raises `pagewire.wire.rpc.RpcError` with a gRPC status; UNAVAILABLE if nothing answers at the address.
    """

    def __init__(
        self,
        address: str = "localhost:8001",
        api_key: str | None = None,
        *,
        ssl_ca_certs: str | None = None,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
    ) -> None:
        """address: "host:port", "grpcs://host:port" for TLS, or "unix:/path". api_key: needed if the stack requires one
        (default: $PAGEWIRE_API_KEY). ssl_ca_certs: PEM file of the CAs that sign the server's certificate (default:
        those of gRPC). ssl_certfile, ssl_keyfile: needed if the stack requires a certificate. The variables
        $PAGEWIRE_SSL_CA_CERTS, $PAGEWIRE_SSL_CERTFILE and $PAGEWIRE_SSL_KEYFILE are the defaults of these three.

        Raises StartupError for files that cannot be used.
        """
        api_key = api_key or os.environ.get("PAGEWIRE_API_KEY", "").partition(",")[0]  # a server may have several
        self._metadata = metadata(api_key) if api_key else None
        self.address = address
        files = Files(certfile=ssl_certfile, keyfile=ssl_keyfile, ca_certs=ssl_ca_certs)
        self._channel = client_channel(address, files)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields responses as tokens are generated; leaving the iteration aborts the request.

        prompt: text, token ids, or chat messages ({"role": "user", "content": "..."}). A message's content may be a
        list of parts: a str is text, a Path is an image file, which is sent, and {"image": URL} is an image that the
        server fetches. Parts, tool calls and tools may also have the form of OpenAI ({"type": "image_url", ...}).
        options: the fields of `GenerateOptions`: sampling parameters (max_tokens, temperature, seed, grammar, ...),
        stop, n, cache_salt and, for chats, tools, tool_choice, reasoning and others; None leaves one unset. With n,
        responses of n outputs alternate, and `index` tells them apart. timeout: seconds for the whole request.

        Raises TypeError for an option that does not exist, ValueError for a wrong form, OSError for a file that
        cannot be read.
        """
        call = self._stub.Generate(generate_request(prompt, options), timeout=timeout, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise RpcError.from_call(error) from error
        finally:
            call.cancel()

    async def embed(
        self,
        texts: Sequence[str | Sequence[int] | Sequence[Message]],
        *,
        model: str = "",
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[list[float]]:
        """Returns the vector of each text, token ids or messages. truncate_prompt_tokens: -1 cuts to the model's
        length."""
        request = inference_pb2.EmbedRequest(
            model=model,
            inputs=[input_text(text) for text in texts],
            options=inference_pb2.InputOptions(truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt),
            prompt_name=prompt_name,
            dimensions=dimensions,
        )
        return [list(vector.values) for vector in (await self._unary(self._stub.Embed, request)).embeddings]

    async def classify(
        self,
        texts: Sequence[str | tuple[str, str] | Sequence[Message]],
        *,
        model: str = "",
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[dict[str, float]]:
        """Returns the scores of each text, or pair of texts, by label."""
        request = inference_pb2.ClassifyRequest(
            model=model,
            inputs=[pair(*text) if isinstance(text, tuple) else input_text(text) for text in texts],
            options=inference_pb2.InputOptions(truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt),
        )
        answer = await self._unary(self._stub.Classify, request)
        return [dict(zip(answer.labels, scores.values, strict=True)) for scores in answer.scores]

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        model: str = "",
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        max_tokens_per_query: int = 0,
        max_tokens_per_doc: int = 0,
    ) -> list[float]:
        """Returns how well the second text of each pair answers the first, by a cross-encoder or the cosine of
        embeddings.

        max_tokens_per_query, max_tokens_per_doc: the lengths to which the texts are cut; 0: not cut.
        """
        request = inference_pb2.ScoreRequest(
            model=model,
            pairs=[pair(*texts) for texts in pairs],
            max_tokens_per_query=max_tokens_per_query,
            max_tokens_per_doc=max_tokens_per_doc,
            options=inference_pb2.InputOptions(truncate_prompt_tokens=truncate_prompt_tokens, cache_salt=cache_salt),
        )
        return list((await self._unary(self._stub.Score, request)).scores)

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a text, or of messages in the chat template. add_special_tokens: None: only to a
        text. chat: fields of `ChatOptions`, for messages."""
        request = tokenize_request(prompt, model, add_special_tokens, chat or {})
        return list((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return str((await self._unary(self._stub.Detokenize, request)).text)

    async def abort(self, *request_ids: str) -> int:
        """Ends generations by request id, including those of other clients, and returns their number."""
        request = inference_pb2.AbortRequestsRequest(request_ids=request_ids)
        return int((await self._unary(self._stub.AbortRequests, request)).num_aborted)

    async def models(self) -> list[inference_pb2.Model]:
        return list((await self._unary(self._stub.ListModels, inference_pb2.ListModelsRequest())).models)

    async def tokenizer_info(self) -> inference_pb2.GetTokenizerInfoResponse:
        """Returns the chat template and the special tokens. FAILED_PRECONDITION: the stack lacks
        --enable-tokenizer-info-endpoint."""
        request = inference_pb2.GetTokenizerInfoRequest()
        info: inference_pb2.GetTokenizerInfoResponse = await self._unary(self._stub.GetTokenizerInfo, request)
        return info

    async def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Makes the model give its memory back until wake(). mode: what becomes of running requests: wait, keep or
        abort (`SleepMode` of admin.proto)."""
        request = admin_pb2.SleepModelRequest(level=level, mode=f"SLEEP_MODE_{mode.upper()}")
        await self._unary(self._admin.SleepModel, request)

    async def wake(self) -> None:
        """Wakes the model, and returns once it takes requests."""
        await self._unary(self._admin.WakeModel, admin_pb2.WakeModelRequest())

    async def reset_prefix_cache(self) -> None:
        """Makes all executors forget the prefixes that later requests could find."""
        await self._unary(self._admin.ResetPrefixCache, admin_pb2.ResetPrefixCacheRequest())

    async def load_adapter(self, name: str, path: str = "") -> None:
        """Loads an adapter, so that requests may name it as their model. path: its files; "": those in --lora-dir."""
        request = admin_pb2.AdminServiceLoadAdapterRequest(name=name, path=path, replaces=True)
        await self._unary(self._admin.LoadAdapter, request)

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise RpcError.from_call(error) from error
