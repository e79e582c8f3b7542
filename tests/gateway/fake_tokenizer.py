"""A tokenizer service without a model: a token id is a character's code point, the output a pure function of prompt,
seed and position. Scriptable: errors, pauses, and streams that break."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pagewire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    inference_link_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from pagewire.v1.inference_link_pb2 import ConnectResponse, GenerateSubmission, NumberedResponse
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenLogprob
from pagewire.wire import rpc, tenants
from pagewire.wire.model_names import names_of, not_served, unservable
from pagewire.wire.rpc import RpcError

VectorsRequest = inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest | inference_pb2.ScoreRequest

ALPHABET = "abcdefghijklmnopqrstuvwxyz é漢"
DEFAULT_MAX_TOKENS = 24
NUM_CACHED_TOKENS = 3


def render(chat: inference_pb2.ChatPrompt) -> str:
    turns = [
        f"<{message.role}>" + (message.content or "\n".join(part.text for part in message.parts))
        for message in chat.messages
    ]
    generate = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return "".join(turns) + ("<assistant>" if generate and turns else "")


def prompt_ids(request: GenerateRequest) -> list[int]:
    which = request.WhichOneof("prompt")
    if which == "token_ids":
        return list(request.token_ids.ids)
    return [ord(c) for c in (request.text if which == "text" else render(request.chat))]


def generated_text(prompt: Sequence[int], seed: int, num_tokens: int) -> str:
    """Returns the output of the model, which depends only on prompt and seed."""
    start = zlib.crc32(repr((list(prompt), seed)).encode())
    return "".join(ALPHABET[zlib.crc32(b"%d %d" % (start, i)) % len(ALPHABET)] for i in range(num_tokens))


def expected_text(prompt: str, seed: int, num_tokens: int = DEFAULT_MAX_TOKENS) -> str:
    return generated_text([ord(c) for c in prompt], seed, num_tokens)


def token_logprob(char: str, num_top: int, text_offset: int = 0) -> TokenLogprob:
    others = [
        TokenLogprob(token_id=ord(c), logprob=-1.0 - i, token=c, token_bytes=c.encode())
        for i, c in enumerate(ALPHABET[:num_top])
    ]
    if others:
        others[-1].logprob = float("-inf")
    return TokenLogprob(
        token_id=ord(char),
        logprob=-0.5,
        token=char,
        token_bytes=char.encode(),
        top_logprobs=others,
        text_offset=text_offset,
    )


def prompt_logprobs(prompt: Sequence[int], num_top: int) -> inference_pb2.PromptLogprobs:
    """Each token is the third most probable, the alternatives are "a", "b", ..."""
    reported = inference_pb2.PromptLogprobs(
        first_token=chr(prompt[0]), text="".join(map(chr, prompt)), text_offsets=range(len(prompt))
    )
    reported.logprobs.entries_per_token = 1 + num_top
    for token_id in prompt[1:]:
        entries = [token_id, *map(ord, ALPHABET[:num_top])]
        reported.tokens.extend(map(chr, entries))
        reported.logprobs.token_ids.extend(entries)
        reported.logprobs.logprobs.extend([-2.5, *(-1.0 - i for i in range(num_top))])
        reported.logprobs.ranks.append(3)
    return reported


@dataclass
class Live:
    """A request that is being answered."""

    request: GenerateRequest
    prompt: list[int]
    text: str  # whole output, one character per token, a stop string included
    num_visible: int  # characters of it that a client may see
    stop: str
    num_resumed: int = 0
    num_done: int = 0
    reported_prompt: bool = False

    def num_emitted(self, num_tokens: int) -> int:
        """Characters sent after so many tokens: the text of each third token is held back until the next."""
        held = 1 if num_tokens % 3 == 0 and 0 < num_tokens < len(self.text) else 0
        return min(num_tokens - held, self.num_visible)

    def advance(self, num_tokens: int) -> GenerateResponse:
        before = self.num_done
        self.num_done = min(before + num_tokens, len(self.text))
        new = self.text[before : self.num_done]
        response = GenerateResponse(
            text=self.text[self.num_emitted(before) : self.num_emitted(self.num_done)],
            token_ids=[ord(c) for c in new],
            usage=common_pb2.Usage(
                prompt_tokens=len(self.prompt),
                completion_tokens=self.num_done,
                # A resumed request finds its own blocks.
                cached_tokens=NUM_CACHED_TOKENS + self.num_resumed,
            ),
        )
        if self.request.sampling_params.HasField("logprobs"):
            num_top = self.request.sampling_params.logprobs
            response.logprobs.extend(token_logprob(c, num_top, before + i) for i, c in enumerate(new))
        if not self.reported_prompt:
            response.prompt_token_ids.extend(self.prompt)
            params = self.request.sampling_params
            if params.HasField("prompt_logprobs") and not self.num_resumed:
                response.prompt_logprobs.CopyFrom(prompt_logprobs(self.prompt, params.prompt_logprobs))
            self.reported_prompt = True
        if self.num_done == len(self.text):
            response.finish_reason = common_pb2.FINISH_REASON_LENGTH
            if self.stop:
                response.finish_reason = common_pb2.FINISH_REASON_STOP
                response.stop_string = self.stop
        return response


@dataclass
class Scripted:
    """A request that is answered with given outputs, each of one token."""

    request: GenerateRequest
    prompt: list[int]
    script: Sequence[GenerateResponse]
    num_done: int = 0

    def advance(self, num_tokens: int) -> GenerateResponse:
        response = GenerateResponse(prompt_token_ids=() if self.num_done else self.prompt)
        response.MergeFrom(self.script[self.num_done])
        self.num_done += 1
        response.token_ids[:] = [self.num_done]
        response.usage.prompt_tokens, response.usage.completion_tokens = len(self.prompt), self.num_done
        return response


def in_columns(responses: Sequence[NumberedResponse]) -> ConnectResponse:
    """Returns a message that has plain deltas in columns."""
    message = ConnectResponse()
    for numbered in responses:
        response = numbered.response
        reported = response.reasoning or response.tool_calls or response.logprobs or response.prompt_token_ids
        if numbered.HasField("error") or response.finish_reason or reported:
            message.responses.append(numbered)
            continue
        message.numbers.append(numbered.number)
        message.texts.append(response.text)
        message.num_tokens.append(len(response.token_ids))
        message.token_ids.extend(response.token_ids)
    return message


class FakeTokenizer(
    inference_pb2_grpc.InferenceServiceServicer,
    inference_link_pb2_grpc.InferenceLinkServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    def __init__(self) -> None:
        self.models = ["fake", "alias"]
        self.max_model_len = 1000
        self.step_s = 0.002
        self.tokens_per_step = 1
        self.steps_left: int | None = None  # None: no end of them
        self.error: RpcError | None = None  # for every request that comes
        self.error_at: tuple[int, RpcError] | None = None  # after so many tokens
        self.break_at: int | None = None  # the stream, once, when a request has so many tokens
        self.generate = generated_text
        self.script: Sequence[GenerateResponse] | None = None  # instead of a text; the last one has a finish reason
        self.running = asyncio.Event()  # cleared: no tokens
        self.running.set()
        self.submissions: list[GenerateSubmission] = []
        self.received: list[GenerateRequest] = []  # what is in them
        self.aborted: list[str] = []  # request ids
        self.live: dict[int, Live | Scripted] = {}
        self.kind = common_pb2.MODEL_KIND_EMBED
        self.vector_calls: list[VectorsRequest] = []
        self.num_cancelled = 0  # of them, and of searches
        self.searches: list[GenerateRequest] = []
        self.tokenized: list[inference_pb2.TokenizeRequest] = []
        self.tenants: list[tenants.Tenant] = []  # of vector calls and searches
        self.replacements: list[admin_pb2.ReplaceWeightsRequest] = []
        self.weights_problem: RpcError | None = None
        self.adapters: dict[str, common_pb2.Adapter] = {}
        self.adapter_calls: list[object] = []
        self.broken_adapters: dict[str, str] = {}  # name -> why it cannot be read
        self.adapter_problem: RpcError | None = None
        self.num_resets = 0
        self.reset_problem: RpcError | None = None
        self.sleeps: list[admin_pb2.SleepModelRequest] = []
        self.sleep_level = 0
        self.sleep_problem: RpcError | None = None
        self.breaks_replacement = False  # loses the connection during the next one
        self.more_metrics = ""  # lines of every service
        self.weights_version = ""  # of those that answer
        self.status = admin_pb2.GetStatusResponse(services=[admin_pb2.ServiceStatus(service="tokenizer")])
        self._server: rpc.Server | None = None

    # The process.

    async def start(self, address: str) -> None:
        server = rpc.Server([address], shutdown_timeout=0.1, interceptors=[tenants.ServiceTenants()])
        server.add(self, inference_pb2_grpc.add_InferenceServiceServicer_to_server, "pagewire.v1.InferenceService")
        add_link = inference_link_pb2_grpc.add_InferenceLinkServiceServicer_to_server
        server.add(self, add_link, "pagewire.v1.InferenceLinkService", is_link=True)
        server.add(self, admin_pb2_grpc.add_AdminServiceServicer_to_server, "pagewire.v1.AdminService")
        await server.start()
        await server.set_serving(True)
        self._server = server

    async def set_serving(self, serving: bool) -> None:
        assert self._server is not None
        await self._server.set_serving(serving)

    async def stop(self, drained: Callable[[], Awaitable[object]] | None = None) -> None:
        """Stops the service. drained: returns when there are no requests; None: the service dies."""
        server = self._server
        if drained is None:
            self._server = None
        if server is not None:
            server.shutdown_timeout = 20
            await server.stop(drained)
        self._server = None

    # The multiplexed stream.

    async def Connect(self, request_iterator, context) -> AsyncIterator[ConnectResponse]:
        live: dict[int, Live | Scripted] = {}
        errors: dict[int, RpcError] = {}
        self.live = live
        yield ConnectResponse(model=self.models[0])
        reader = asyncio.create_task(self._read(request_iterator, live, errors))
        try:
            while True:
                await asyncio.sleep(self.step_s)
                await self.running.wait()
                if live and self.steps_left is not None:
                    if not self.steps_left:
                        continue
                    self.steps_left -= 1
                if self._server is None:
                    raise RpcError(grpc.StatusCode.UNAVAILABLE, "the service stops")
                if self.break_at is not None and any(one.num_done >= self.break_at for one in live.values()):
                    self.break_at = None
                    raise RpcError(grpc.StatusCode.UNAVAILABLE, "broken on purpose")
                if responses := self._step(live, errors):
                    yield in_columns(responses)
        finally:
            reader.cancel()

    async def _read(self, request_iterator, live: dict[int, Live | Scripted], errors: dict[int, RpcError]) -> None:
        async for message in request_iterator:
            for numbered in message.requests:
                self.submissions.append(numbered)
                self.received.append(numbered.request)
                try:
                    live[numbered.number] = self._begin(numbered.request, numbered.resume_token_ids)
                except RpcError as error:
                    errors[numbered.number] = error
            for number in message.abort_numbers:
                if aborted := live.pop(number, None):
                    self.aborted.append(aborted.request.request_id)

    def _begin(self, request: GenerateRequest, resume_token_ids: Sequence[int] = ()) -> Live | Scripted:
        if self.error is not None:
            raise self.error
        self._check_model(request.model)
        prompt = prompt_ids(request)
        if self.script is not None:
            return Scripted(request, prompt, self.script, len(resume_token_ids))
        params = request.sampling_params
        num_tokens = params.max_tokens if params.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        if len(prompt) + num_tokens > self.max_model_len:
            message = f"prompt of {len(prompt)} tokens and max_tokens {num_tokens} exceed {self.max_model_len}"
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, message)
        text = self.generate(prompt, params.seed, num_tokens)
        hits = [(text.index(stop), stop) for stop in request.stop if stop in text]
        stop_at, stop = min(hits, default=(len(text), ""))
        live = Live(request, prompt, text[: stop_at + len(stop)], stop_at, stop, len(resume_token_ids))
        if resume_token_ids:
            # Only a request that differs from a fresh one may be resumed.
            has_images = any(part.HasField("image") for message in request.chat.messages for part in message.parts)
            assert request.WhichOneof("prompt") == ("chat" if has_images else "token_ids")
            live.num_done = len(resume_token_ids)
            assert [ord(c) for c in text[: live.num_done]] == list(resume_token_ids)
        return live

    def _check_model(self, model: str) -> None:
        if model in self.broken_adapters:
            raise RpcError(grpc.StatusCode.NOT_FOUND, unservable(model, self.broken_adapters[model]))
        if model and model not in names_of(self.models, list(self.adapters)):
            raise RpcError(grpc.StatusCode.NOT_FOUND, not_served(model, self.models))

    def _step(self, live: dict[int, Live | Scripted], errors: dict[int, RpcError]) -> list[NumberedResponse]:
        responses = []
        for number, one in list(live.items()):
            if self.error_at is not None and one.num_done >= self.error_at[0]:
                errors[number] = self.error_at[1]
                del live[number]
                continue
            response = one.advance(self.tokens_per_step)
            if response.prompt_token_ids:
                response.weights_version = self.weights_version
                if (adapter := self.adapters.get(one.request.model)) is not None:
                    response.adapter_digest = adapter.digest
            responses.append(NumberedResponse(number=number, response=response))
            if response.finish_reason:
                del live[number]
        for number, error in errors.items():
            responses.append(NumberedResponse(number=number, error=error.to_message()))
        errors.clear()
        return responses

    # Single calls.

    async def Generate(self, request, context) -> AsyncIterator[GenerateResponse]:
        """A search: of the outputs of best_of seeds, or of n, the last are the best."""
        self.searches.append(request)
        self.tenants.append(tenants.present.get())
        try:
            await self.running.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        count = max(request.n, request.best_of)
        if self.error is not None:
            raise self.error
        for index in range(request.n):
            one = GenerateRequest()
            one.CopyFrom(request)
            one.sampling_params.seed += count - 1 - index
            response = self._begin(one).advance(10_000)
            response.index = index
            yield response

    async def Tokenize(self, request, context) -> inference_pb2.TokenizeResponse:
        self._check_model(request.model)
        self.tokenized.append(request)
        text = request.text if request.WhichOneof("prompt") == "text" else render(request.chat)
        if request.add_special_tokens or not request.HasField("add_special_tokens"):
            text = "^" + text
        return inference_pb2.TokenizeResponse(
            token_ids=[ord(c) for c in text],
            token_strs=list(text) if request.return_token_strs else [],
            max_model_len=self.max_model_len,
        )

    async def Embed(self, request, context) -> inference_pb2.EmbedResponse:
        """Returns (number of tokens, 0.5) for each input."""
        lengths = await self._read_inputs(request, request.inputs)
        vectors = [common_pb2.Vector(values=[length, 0.5][: request.dimensions or None]) for length in lengths]
        return inference_pb2.EmbedResponse(embeddings=vectors, num_tokens=lengths)

    async def Classify(self, request, context) -> inference_pb2.ClassifyResponse:
        lengths = await self._read_inputs(request, request.inputs)
        scores = [common_pb2.Vector(values=[0.25, 0.75] if length % 2 else [1, 0]) for length in lengths]
        return inference_pb2.ClassifyResponse(scores=scores, num_tokens=lengths, labels=["even", "odd"])

    async def Score(self, request, context) -> inference_pb2.ScoreResponse:
        """The share of the second text's characters that the first has too."""
        lengths = await self._read_inputs(request, request.pairs)
        scores = [sum(c in pair.text for c in pair.text_pair) / len(pair.text_pair) for pair in request.pairs]
        return inference_pb2.ScoreResponse(scores=scores, num_tokens=lengths)

    async def _read_inputs(self, request: VectorsRequest, inputs: Sequence[inference_pb2.InputText]) -> list[int]:
        """Tokens of each."""
        self.vector_calls.append(request)
        self.tenants.append(tenants.present.get())
        try:
            await self.running.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        self._check_model(request.model)
        return [len(one.text + one.text_pair + render(one.chat)) or len(one.token_ids.ids) for one in inputs]

    async def AbortRequests(self, request, context) -> inference_pb2.AbortRequestsResponse:
        return inference_pb2.AbortRequestsResponse(num_aborted=len(request.request_ids))

    async def CountRequests(self, request, context) -> inference_pb2.CountRequestsResponse:
        return inference_pb2.CountRequestsResponse(num_requests=0)

    async def Detokenize(self, request, context) -> inference_pb2.DetokenizeResponse:
        self._check_model(request.model)
        return inference_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def ListModels(self, request, context) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.Model(
                    id=name,
                    root="fake",
                    max_model_len=self.max_model_len,
                    create_time={"seconds": 1700000000},
                    kind=self.kind,
                    default_sampling_params={"temperature": 0.2, "top_k": 20},
                    default_sampling_source="generation_config.json",
                    sleep_level=self.sleep_level,
                )
                for name in self.models
            ]
            + [
                inference_pb2.Model(id=name, root=adapter.path, parent=self.models[0])
                for name, adapter in self.adapters.items()
            ]
        )

    async def GetStatus(self, request, context) -> admin_pb2.GetStatusResponse:
        return self.status

    async def LoadAdapter(self, request, context) -> admin_pb2.AdminServiceLoadAdapterResponse:
        self.adapter_calls.append(request)
        if self.adapter_problem is not None:
            raise self.adapter_problem
        if request.path:
            self.adapters[request.name] = common_pb2.Adapter(
                name=request.name, path=request.path, digest="0123456789abcdef", rank=8, base_model="base"
            )
        elif request.name not in self.adapters:
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"the adapter {request.name!r} does not exist")
        return admin_pb2.AdminServiceLoadAdapterResponse(adapter=self.adapters[request.name])

    async def UnloadAdapter(self, request, context) -> admin_pb2.AdminServiceUnloadAdapterResponse:
        self.adapter_calls.append(request)
        if self.adapters.pop(request.name, None) is None:
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"the adapter {request.name!r} does not exist")
        return admin_pb2.AdminServiceUnloadAdapterResponse()

    async def ReplaceWeights(self, request, context) -> admin_pb2.ReplaceWeightsResponse:
        self.replacements.append(request)
        if self.breaks_replacement:
            self.breaks_replacement = False
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if self.weights_problem is not None:
            raise self.weights_problem
        return admin_pb2.ReplaceWeightsResponse(version=request.version or "d1", previous_version="d0", num_executors=2)

    def _sleep(self, level: int) -> None:
        self.sleep_level = level
        scheduler = admin_pb2.SchedulerStatus(sleep=admin_pb2.ModelSleepStatus(level=level))
        del self.status.services[1:]
        self.status.services.append(admin_pb2.ServiceStatus(service="scheduler", scheduler=scheduler))

    async def SleepModel(self, request, context) -> admin_pb2.SleepModelResponse:
        self.sleeps.append(request)
        if self.sleep_problem is not None:
            raise self.sleep_problem
        self._sleep(request.level)
        return admin_pb2.SleepModelResponse(num_executors=2)

    async def WakeModel(self, request, context) -> admin_pb2.WakeModelResponse:
        if self.sleep_problem is not None:
            raise self.sleep_problem
        self._sleep(0)
        return admin_pb2.WakeModelResponse(num_executors=2)

    async def ResetPrefixCache(self, request, context) -> admin_pb2.ResetPrefixCacheResponse:
        self.num_resets += 1
        if self.reset_problem is not None:
            raise self.reset_problem
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=7, num_executors=2)

    async def GetMetrics(self, request, context) -> admin_pb2.GetMetricsResponse:
        services = []
        for name in ("tokenizer", "scheduler"):
            registry = CollectorRegistry()
            Counter("pagewire:shared", "In both.\nWith \\ and a line break.", ["kind"], registry=registry).labels(
                'a"b'
            ).inc(2)
            Histogram(f"pagewire:{name}_seconds", "Its own.", registry=registry, buckets=(0.1, 1)).observe(0.5)
            exposition = generate_latest(registry).decode() + self.more_metrics
            services.append(admin_pb2.ServiceMetrics(service=name, exposition=exposition))
        return admin_pb2.GetMetricsResponse(services=services)
