"""The tokenizer service on a real socket, in front of a scheduler with scripted tokens.

A request for a vector gets (0.6, 0, 0.8) or what `vectors` says, or of a classifier the number of its tokens.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pagewire.config import TokenizerConfig
from pagewire.services.tokenizer.main import load_pool, make_generator, make_servers, report_availability
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.scheduler_link import SchedulerLink
from pagewire.v1 import admin_pb2, common_pb2, inference_pb2, inference_pb2_grpc, scheduler_link_pb2, scheduler_pb2
from pagewire.v1.inference_link_pb2 import ConnectRequest, ConnectResponse, GenerateSubmission
from pagewire.v1.inference_link_pb2_grpc import InferenceLinkServiceStub
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectResponse, TokenSubmission
from pagewire.v1.scheduler_link_pb2_grpc import (
    SchedulerLinkServiceServicer,
    add_SchedulerLinkServiceServicer_to_server,
)
from pagewire.wire import rpc
from pagewire.wire.discovery import discover
from pagewire.wire.secure_rpc import NO_TLS
from tests.fakes import fake_prompt_logprobs

EOS = 2
_SCHEDULER = scheduler_link_pb2.DESCRIPTOR.services_by_name["SchedulerLinkService"].full_name
Script = Callable[[scheduler_pb2.TokenRequest], list[int]]


def adapter_of(name: str, digest: str) -> common_pb2.Adapter:
    return common_pb2.Adapter(name=name, path=f"/adapters/{name}", digest=digest, rank=8)


@dataclass
class _Running:
    request: scheduler_pb2.TokenRequest
    output: list[int]
    num_sent: int
    stream: asyncio.Queue


@dataclass
class FakeScheduler(SchedulerLinkServiceServicer):
    """Sends each request the tokens that `script` gives for it, one per step(), resuming as the contract says."""

    script: Script
    max_model_len: int = 1000
    kind: int = common_pb2.MODEL_KIND_UNSPECIFIED
    labels: tuple[str, ...] = ()
    vector_size: int = 3  # without labels
    # A step follows each message and each step, or only step() makes one.
    auto: bool = True
    tokens_per_step: int = 1
    # More are refused, unless they are resubmitted.
    max_running: int = 1_000_000
    # Of each token of a request.
    logprob: Callable[[scheduler_pb2.TokenRequest], float] = lambda request: -0.5
    vectors: dict[tuple[int, ...], list[float]] = field(default_factory=dict)  # by prompt
    submissions: list[TokenSubmission] = field(default_factory=list)
    requests: list[scheduler_pb2.TokenRequest] = field(default_factory=list)  # what is in them
    aborted: list[int] = field(default_factory=list)
    num_streams: int = 0
    adapters: dict[str, str] = field(default_factory=dict)  # name -> digest, of those in the greeting
    adapter_files: dict[str, str] = field(default_factory=dict)  # name or path -> digest, of those that can be loaded
    adapter_problems: dict[str, str] = field(default_factory=dict)  # name -> why it cannot be served
    adapters_asked_for: list[str] = field(default_factory=list)  # names
    # Said instead of tokens, by the index of the request's arrival.
    errors: dict[int, common_pb2.RequestError] = field(default_factory=dict)
    _running: dict[tuple[int, int], _Running] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def Connect(self, request_iterator, context):
        self.num_streams += 1
        stream_id, queue = self.num_streams, asyncio.Queue()
        info = common_pb2.ModelInfo(
            model="fake",
            max_model_len=self.max_model_len,
            vocab_size=49_152,
            eos_token_ids=[EOS],
            max_logprobs=20,
            kind=self.kind,
            labels=self.labels,
            vector_size=len(self.labels) or self.vector_size,
            adapters=[
                *(adapter_of(name, digest) for name, digest in self.adapters.items()),
                *(adapter_of(name, "") for name in self.adapter_files.keys() - self.adapters.keys() if "/" not in name),
                *(common_pb2.Adapter(name=name, problem=why) for name, why in self.adapter_problems.items()),
            ],
        )
        yield SchedulerLinkServiceConnectResponse(hello=info)

        async def read() -> None:
            async for message in request_iterator:
                for submission in message.requests:
                    self._start(stream_id, queue, submission)
                for request_id in message.abort_request_ids:
                    self.aborted.append(request_id)
                    self._running.pop((stream_id, request_id), None)
                self._notify()

        reader = asyncio.create_task(read())
        try:
            while True:
                changed = self._changed
                if self.auto and queue.empty():
                    self._step_stream(stream_id)
                if queue.empty():
                    await changed.wait()
                else:
                    yield queue.get_nowait()
                    await asyncio.sleep(0.003)  # a step takes time, in which its tokens reach the client
        finally:
            for key in [key for key in self._running if key[0] == stream_id]:
                del self._running[key]
            await rpc.cancel([reader])

    async def load(
        self, request: admin_pb2.AdminServiceLoadAdapterRequest
    ) -> admin_pb2.AdminServiceLoadAdapterResponse:
        self.adapters_asked_for.append(request.name)
        digest = self.adapter_files.get(request.path or request.name)
        if digest is None:
            raise rpc.RpcError(grpc.StatusCode.NOT_FOUND, f"there is no adapter {request.name}")
        self.adapters[request.name] = digest
        return admin_pb2.AdminServiceLoadAdapterResponse(adapter=adapter_of(request.name, digest))

    async def unload(
        self, request: admin_pb2.AdminServiceUnloadAdapterRequest
    ) -> admin_pb2.AdminServiceUnloadAdapterResponse:
        if self.adapters.pop(request.name, None) is None:
            raise rpc.RpcError(grpc.StatusCode.NOT_FOUND, f"there is no adapter {request.name}")
        return admin_pb2.AdminServiceUnloadAdapterResponse()

    async def reset(self, request: admin_pb2.ResetPrefixCacheRequest) -> admin_pb2.ResetPrefixCacheResponse:
        return admin_pb2.ResetPrefixCacheResponse()

    async def sleep(self, request: admin_pb2.SleepModelRequest) -> admin_pb2.SleepModelResponse:
        return admin_pb2.SleepModelResponse(num_executors=1)

    async def wake(self, request: admin_pb2.WakeModelRequest) -> admin_pb2.WakeModelResponse:
        return admin_pb2.WakeModelResponse(num_executors=1)

    async def subscribe(
        self, request: admin_pb2.SubscribeKvEventsRequest
    ) -> AsyncGenerator[admin_pb2.SubscribeKvEventsResponse]:
        yield admin_pb2.SubscribeKvEventsResponse(snapshot_parts_left=1)

    def _start(self, stream_id: int, queue: asyncio.Queue, submission: TokenSubmission) -> None:
        request = submission.request
        self.submissions.append(submission)
        self.requests.append(request)
        error = self.errors.get(len(self.requests) - 1)
        if len(self._running) >= self.max_running and not submission.resubmitted:
            error = common_pb2.RequestError(code=8, message="too many wait")
        if error is not None:
            message = SchedulerLinkServiceConnectResponse(
                request_ids=[submission.request_id],
                num_tokens=[0],
                finish_reasons=[common_pb2.FINISH_REASON_ERROR],
                cached_tokens=[0],
            )
            message.errors[0].CopyFrom(error)
            queue.put_nowait(message)
            return
        output = self.script(request)[: request.sampling_params.max_tokens or None]
        resumed = list(submission.resume_token_ids)
        assert output[: len(resumed)] == resumed, "resumed with tokens that were never sent"
        self._running[stream_id, submission.request_id] = _Running(request, output, len(resumed), queue)

    def step(self) -> None:
        """Sends tokens_per_step tokens to every request."""
        for stream_id in {stream_id for stream_id, _ in self._running}:
            self._step_stream(stream_id)
        self._notify()

    def _step_stream(self, stream_id: int) -> None:
        message = SchedulerLinkServiceConnectResponse()
        queue = None
        for key, running in list(self._running.items()):
            if key[0] != stream_id:
                continue
            queue = running.stream
            new = running.output[running.num_sent : running.num_sent + self.tokens_per_step]
            running.num_sent += len(new)
            reason = common_pb2.FINISH_REASON_UNSPECIFIED
            if running.num_sent >= len(running.output):
                stops = bool(new) and new[-1] == EOS
                reason = common_pb2.FINISH_REASON_STOP if stops else common_pb2.FINISH_REASON_LENGTH
                del self._running[key]
            if running.request.yields_vector:
                self._running.pop(key, None)
                reason = common_pb2.FINISH_REASON_STOP
                prompt = tuple(running.request.prompt_token_ids)
                values = [float(len(prompt))] if self.labels else self.vectors.get(prompt, [0.6, 0.0, 0.8])
                message.vectors[len(message.request_ids)].values.extend(values)
            if running.request.sampling_params.HasField("logprobs"):
                message.logprobs[len(message.request_ids)].CopyFrom(self.logprobs_of(running.request, new))
            params = running.request.sampling_params
            if params.HasField("prompt_logprobs") and running.num_sent == len(new):
                of_prompt = fake_prompt_logprobs(running.request.prompt_token_ids, params.prompt_logprobs, 49_152)
                message.prompt_logprobs[len(message.request_ids)].CopyFrom(of_prompt)
            message.request_ids.append(key[1])
            message.num_tokens.append(len(new))
            message.token_ids.extend(new)
            message.finish_reasons.append(reason)
            message.cached_tokens.append(16 * self.num_streams)
        if queue is not None:
            queue.put_nowait(message)

    def logprobs_of(self, request: scheduler_pb2.TokenRequest, new: Sequence[int]) -> common_pb2.Logprobs:
        k = request.sampling_params.logprobs + 1
        return common_pb2.Logprobs(
            entries_per_token=k,
            token_ids=[token + i for token in new for i in range(k)],
            logprobs=[self.logprob(request) - i for _ in new for i in range(k)],
            ranks=[1] * len(new),
        )

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what the service does to reach this side."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 (what is awaited happens behind a socket)
                await asyncio.sleep(0.005)


class TokenizerLine:
    """Fake scheduler and real tokenizer service on unix sockets below `directory`."""

    def __init__(self, directory: Path, scheduler: FakeScheduler, model: Path, **config: object) -> None:
        self.scheduler = scheduler
        self.config = TokenizerConfig(
            model=str(model),
            listen=f"unix:{directory}/tokenizer.sock",
            scheduler_address=f"unix:{directory}/scheduler.sock",
            **config,
        )
        self._scheduler_server: rpc.Server | None = None

    async def start_scheduler(self) -> None:
        server = rpc.Server([self.config.scheduler_address])
        server.add(self.scheduler, add_SchedulerLinkServiceServicer_to_server, _SCHEDULER, is_link=True)
        server.add_admin("scheduler", adapters=self.scheduler, caches=self.scheduler, sleep=self.scheduler)
        await server.start()
        await server.set_serving(True)
        self._scheduler_server = server

    async def kill_scheduler(self) -> None:
        if self._scheduler_server is not None:
            await self._scheduler_server.stop()
            self._scheduler_server = None

    @asynccontextmanager
    async def running(
        self, *, with_scheduler: bool = True, pool: TokenizerPool | None = None
    ) -> AsyncIterator["TokenizerLine"]:
        if with_scheduler:
            await self.start_scheduler()
        self.pool = pool or await asyncio.to_thread(load_pool, self.config)
        schedulers = discover("static", "--scheduler-address", self.config.scheduler_address)
        self.link = SchedulerLink(schedulers, NO_TLS.listed_channel, recovery_timeout=self.config.recovery_timeout)
        self.generator = make_generator(self.config, self.pool, self.link)
        servers = make_servers(self.config, self.generator)
        for server in servers:
            await server.start()
        tasks = [asyncio.create_task(self.link.run()), asyncio.create_task(report_availability(self.link, *servers))]
        self.channel = rpc.channel(self.config.listen)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.gateway_stub = InferenceLinkServiceStub(self.channel)
        try:
            yield self
            for task in tasks:
                assert not task.done(), task
        finally:
            await self.channel.close()
            for server in servers:
                await server.stop()
            await rpc.cancel(tasks)
            await self.kill_scheduler()
            if pool is None:
                self.pool.close()

    async def generate(
        self, *, resume_token_ids: Sequence[int] = (), resubmitted: bool = False, **fields: object
    ) -> "Collected":
        """Raises AioRpcError; or RpcError for what is submitted as gateways do, as clients cannot say it."""
        request = inference_pb2.GenerateRequest(**fields)
        if resume_token_ids or resubmitted:
            return await self._submit(
                GenerateSubmission(request=request, resume_token_ids=resume_token_ids, resubmitted=resubmitted)
            )
        collected = Collected()
        async for response in self.stub.Generate(request):
            collected.add(response)
        return collected

    async def _submit(self, submission: GenerateSubmission) -> "Collected":
        gateway = Gateway(self)
        await gateway.send({1: submission})
        await gateway.read_until_finished(1)
        gateway.call.cancel()
        collected = gateway.requests[1]
        if collected.error is not None:
            raise rpc.RpcError.from_message(collected.error)
        return collected


@dataclass
class Collected:
    """The output of one request that a client has received."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    usage: common_pb2.Usage = field(default_factory=common_pb2.Usage)
    finish_reason: int = 0
    stop_string: str = ""
    responses: list[inference_pb2.GenerateResponse] = field(default_factory=list)
    error: common_pb2.RequestError | None = None

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        assert not self.finish_reason, "output after the end"
        assert self.responses == [] or not response.prompt_token_ids, "the prompt comes once"
        self.responses.append(response)
        self.text += response.text
        self.token_ids += response.token_ids
        self.prompt_token_ids += response.prompt_token_ids
        self.logprobs += response.logprobs
        self.usage = response.usage
        self.finish_reason = response.finish_reason
        self.stop_string = response.stop_string
        assert self.usage.completion_tokens >= len(self.token_ids)


Submitted = inference_pb2.GenerateRequest | GenerateSubmission


def _numbered(number: int, request: Submitted) -> GenerateSubmission:
    if isinstance(request, GenerateSubmission):
        request.number = number
        return request
    return GenerateSubmission(number=number, request=request)


class Gateway:
    """A gateway's end of Connect."""

    def __init__(self, line: TokenizerLine) -> None:
        self.call = line.gateway_stub.Connect()
        self.requests: dict[int, Collected] = {}
        self.num_in_columns = 0
        self._is_greeted = False

    async def send(self, requests: "dict[int, Submitted] | None" = None, aborts=()) -> None:
        if not self._is_greeted:
            greeting = await self.read()
            assert greeting == ConnectResponse(model=greeting.model) and greeting.model
            self._is_greeted = True
        requests = requests or {}
        for number in requests:
            self.requests[number] = Collected()
        submissions = [_numbered(number, request) for number, request in requests.items()]
        await self.call.write(ConnectRequest(requests=submissions, abort_numbers=aborts))

    async def read(self) -> ConnectResponse:
        response = await asyncio.wait_for(self.call.read(), 20)
        assert response is not grpc.aio.EOF
        numbers = [*response.numbers, *(one.number for one in response.responses)]
        assert len(set(numbers)) == len(numbers), "one entry per request"
        for one in response.responses:
            if one.WhichOneof("outcome") == "error":
                self.requests[one.number].error = one.error
            else:
                self.requests[one.number].add(one.response)
        token_ids = iter(response.token_ids)
        for number, text, num_tokens in zip(response.numbers, response.texts, response.num_tokens, strict=True):
            request = self.requests[number]
            usage = common_pb2.Usage()
            usage.CopyFrom(request.usage)
            usage.completion_tokens += num_tokens
            new = [next(token_ids) for _ in range(num_tokens)]
            request.add(inference_pb2.GenerateResponse(text=text, token_ids=new, usage=usage))
        assert next(token_ids, None) is None
        self.num_in_columns += len(response.numbers)
        return response

    async def read_until_finished(self, *numbers: int) -> None:
        def done(request: Collected) -> bool:
            return bool(request.finish_reason) or request.error is not None

        while not all(done(self.requests[number]) for number in numbers):
            await self.read()
