"""An asynchronous Python client of the public text-level gRPC service."""

import base64
import mimetypes
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from pagewire import rpc
from pagewire.rpc import RpcError
from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class Client:
    """Talks to a running stack: `async with Client("localhost:8001") as client: ...`.

    Every call raises `pagewire.rpc.RpcError` with a gRPC status; UNAVAILABLE if nothing answers at the address.
    """

    def __init__(self, address: str = "localhost:8001") -> None:
        """address: "host:port" or "unix:/path"."""
        self.address = address
        self._channel = rpc.channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

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
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        stop: Sequence[str] = (),
        bad_words: Sequence[str] = (),
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        request_id: str = "",
        n: int = 1,
        best_of: int | None = None,
        beam_search: inference_pb2.BeamSearch | None = None,
        timeout: float | None = None,
        **sampling_params: Any,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Responses as tokens are generated; leaving the iteration aborts the request.

        prompt: text, token ids, or chat messages ({"role": "user", "content": "..."}). A message's content may be a
        list of parts: a str is text, a Path an image file, which is sent along, and {"image": URL} an image that the
        server reads. Parts as OpenAI writes them ({"type": "image_url", ...}) are taken, too. sampling_params: fields
        of `SamplingParams` (max_tokens, temperature, seed, ...); None leaves a field unset. The others are fields of
        `GenerateRequest`. With n, responses are of n outputs by turns: `index` says of which.

        Raises OSError for a file that cannot be read, ValueError for a part of another form.
        """
        given = {name: value for name, value in sampling_params.items() if value is not None}
        request = inference_pb2.GenerateRequest(
            model=model,
            stop=stop,
            bad_words=bad_words,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
            request_id=request_id,
            n=n,
            best_of=best_of,
            beam_search=beam_search,
            sampling_params=common_pb2.SamplingParams(**given),
            **_prompt(prompt),
        )
        call = self._stub.Generate(request, timeout=timeout)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise RpcError.from_call(error) from error
        finally:
            call.cancel()

    async def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        model: str = "",
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[list[float]]:
        """The vector of each text (or of its token ids). truncate_prompt_tokens: -1 cuts to what the model takes."""
        request = inference_pb2.EmbedRequest(
            model=model,
            inputs=[_input(text) for text in texts],
            options=inference_pb2.InputOptions(truncate_prompt_tokens=truncate_prompt_tokens),
            prompt_name=prompt_name,
            dimensions=dimensions,
        )
        return [list(vector.values) for vector in (await self._unary(self._stub.Embed, request)).embeddings]

    async def classify(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        model: str = "",
        truncate_prompt_tokens: int | None = None,
    ) -> list[dict[str, float]]:
        """The score of each label, by its name, of each text or pair of texts."""
        request = inference_pb2.ClassifyRequest(
            model=model,
            inputs=[_input(text) if isinstance(text, str) else _pair(*text) for text in texts],
            options=inference_pb2.InputOptions(truncate_prompt_tokens=truncate_prompt_tokens),
        )
        answer = await self._unary(self._stub.Classify, request)
        return [dict(zip(answer.labels, scores.values, strict=True)) for scores in answer.scores]

    async def score(
        self, pairs: Sequence[tuple[str, str]], *, model: str = "", truncate_prompt_tokens: int | None = None
    ) -> list[float]:
        """How well the second text of each pair answers the first, by a cross-encoder."""
        request = inference_pb2.ScoreRequest(
            model=model,
            pairs=[_pair(*pair) for pair in pairs],
            options=inference_pb2.InputOptions(truncate_prompt_tokens=truncate_prompt_tokens),
        )
        return list((await self._unary(self._stub.Score, request)).scores)

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        request = inference_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return str((await self._unary(self._stub.Detokenize, request)).text)

    async def abort(self, *request_ids: str) -> int:
        """Ends generations by the ids of their requests, whoever sent them; returns how many there were."""
        request = inference_pb2.AbortRequestsRequest(request_ids=request_ids)
        return int((await self._unary(self._stub.AbortRequests, request)).num_aborted)

    async def models(self) -> list[inference_pb2.Model]:
        return list((await self._unary(self._stub.ListModels, inference_pb2.ListModelsRequest())).models)

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            raise RpcError.from_call(error) from error


def _input(text: str | Sequence[int]) -> inference_pb2.InputText:
    if isinstance(text, str):
        return inference_pb2.InputText(text=text)
    return inference_pb2.InputText(token_ids=inference_pb2.TokenIds(ids=text))


def _pair(text: str, text_pair: str) -> inference_pb2.InputText:
    return inference_pb2.InputText(text=text, text_pair=text_pair)


def _prompt(prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The member of GenerateRequest's oneof."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if prompt and isinstance(prompt[0], Mapping):
        return {"chat": inference_pb2.ChatPrompt(messages=[_message(m) for m in prompt])}  # type: ignore[arg-type]
    return {"token_ids": inference_pb2.TokenIds(ids=prompt)}  # type: ignore[arg-type]


def _message(message: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return inference_pb2.ChatMessage(**message)
    others = {key: value for key, value in message.items() if key != "content"}
    return inference_pb2.ChatMessage(**others, parts=[_part(part) for part in content])


def _part(part: str | Path | Mapping[str, Any]) -> inference_pb2.ContentPart:
    if isinstance(part, str):
        return inference_pb2.ContentPart(text=part)
    if isinstance(part, Path):
        kind = mimetypes.guess_type(part.name)[0] or "image/png"
        data = base64.b64encode(part.read_bytes()).decode()
        return inference_pb2.ContentPart(image=inference_pb2.ImageSource(url=f"data:{kind};base64,{data}"))
    if "text" in part:
        return inference_pb2.ContentPart(text=part["text"])
    image = part.get("image_url", part.get("image"))
    url = image.get("url") if isinstance(image, Mapping) else image
    if isinstance(url, Path):
        return _part(url)
    if not isinstance(url, str):
        expected = 'a str, a Path, {"text": ...} or {"image": URL}'
        raise ValueError(f"a part of a message is {expected}, not {part!r:.100}")
    return inference_pb2.ContentPart(image=inference_pb2.ImageSource(url=url))
