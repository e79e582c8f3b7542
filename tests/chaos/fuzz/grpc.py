"""Every RPC of tokenizer and scheduler, public and internal: messages almost right, and bytes that are none."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from google.protobuf import descriptor_pool, json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pagewire.v1 import (  # noqa: F401 - what they define is looked up by name
    admin_pb2,
    inference_link_pb2,
    inference_pb2,
    scheduler_link_pb2,
    scheduler_pb2,
)
from tests.chaos.fuzz.line import CASE_TIMEOUT_S, Finding, FuzzLine, is_unreadable, refusals
from tests.chaos.fuzz.mutation import Mutator

# What grpcio says itself of a stream that ended while the client was writing.
_WRITE_FAILED = "Internal error from Core"
_SERVICES = {
    "tokenizer": ("InferenceService", "InferenceLinkService", "AdminService"),
    "scheduler": ("SchedulerService", "SchedulerLinkService", "AdminService"),
}
_SAMPLING = {"maxTokens": 4, "temperature": 0.7, "seed": "3", "logprobs": 2, "topP": 0.9}
_CHAT = {
    "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "toolCalls": [{"id": "c", "name": "f", "arguments": "{}"}]},
        {"role": "tool", "content": "4", "toolCallId": "c"},
    ],
}
_TEXT = {"text": "Once upon a time", "samplingParams": _SAMPLING, "requestId": "r", "stop": [".", "the"]}
_TOKENS = {"promptTokenIds": [1, 5, 6, 7], "samplingParams": {"maxTokens": 3, "temperature": 0, "seed": "1"}}
_TOOL = {"name": "f", "parametersJson": '{"type": "object", "properties": {"a": {"type": "integer"}}}', "strict": True}
_PARSED = {
    "chat": _CHAT | {"tools": [_TOOL]},
    "outputParsing": {"reasoning": True, "toolCalls": True, "tools": [_TOOL]},
}
_GRAMMAR = {
    "maxTokens": 4,
    "grammar": {"jsonSchema": '{"type": "object"}'},
    "logitBiasIds": [5],
    "logitBiasValues": [1],
}
# method -> valid requests, as JSON
VALID: dict[str, list[dict]] = {
    "InferenceService/Generate": [
        _TEXT,
        {"chat": _CHAT, "samplingParams": _SAMPLING, "n": 2},
        {"text": "a", "samplingParams": {"maxTokens": 4}, "n": 2, "beamSearch": {"lengthPenalty": 1.5}},
        {"tokenIds": {"ids": [1, 2, 3]}, "samplingParams": _GRAMMAR, "badWords": ["a"], "truncatePromptTokens": 2},
        _PARSED | {"samplingParams": {"maxTokens": 4, "promptLogprobs": 1}, "thinkingTokenBudget": 2},
        {"text": "a", "samplingParams": {"maxTokens": 4}, "n": 2, "bestOf": 3, "cacheSalt": "s"},
    ],
    "InferenceService/Embed": [{"inputs": [{"text": "a"}, {"text": "b"}]}],
    "InferenceService/Classify": [{"inputs": [{"text": "a"}]}],
    "InferenceService/Score": [{}],
    "InferenceService/Tokenize": [{"text": "Hello"}, {"chat": _CHAT}],
    "InferenceService/Detokenize": [{"tokenIds": [1, 2, 300]}],
    "InferenceService/AbortRequests": [{"requestIds": ["r"]}],
    "InferenceService/ListModels": [{"pageSize": 1}],
    "InferenceLinkService/Connect": [
        {"requests": [{"number": 1, "request": _TEXT}, {"number": 2, "request": {"chat": _CHAT}}], "abortNumbers": [3]}
    ],
    "SchedulerService/Generate": [{"request": _TOKENS}],
    "SchedulerService/Abort": [{"externalIds": ["r"]}],
    "SchedulerLinkService/Connect": [
        {"requests": [{"requestId": 1, "request": _TOKENS}], "abortRequestIds": [9]},
        {"requests": [{"requestId": 4, "request": _TOKENS, "resubmitted": True, "resumeTokenIds": [5]}]},
    ],
}


@dataclass(frozen=True)
class Method:
    """An RPC. service: the service with the channel that reaches it."""

    service: str
    descriptor: MethodDescriptor

    @property
    def name(self) -> str:
        return f"{self.descriptor.containing_service.name}/{self.descriptor.name}"

    @property
    def path(self) -> str:
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"

    def valid(self, mutator: Mutator) -> Message:
        message = GetMessageClass(self.descriptor.input_type)()
        json_format.ParseDict(mutator.random.choice(VALID.get(self.name, [{}])), message)
        return message


def methods() -> list[Method]:
    find = descriptor_pool.Default().FindServiceByName
    return [
        Method(service, method)
        for service, names in _SERVICES.items()
        for name in names
        for method in find(f"pagewire.v1.{name}").methods
    ]


def encoded(mutator: Mutator, method: Method) -> bytes:
    """A request of this method: a valid message that was changed, or the bytes of one."""
    message = method.valid(mutator)
    if mutator.is_so(0.7):
        message = mutator.message(message)
    data = message.SerializeToString()
    return mutator.bytes(data) if mutator.is_so(0.4) else data


async def fuzz(line: FuzzLine, seed: int, only: Callable[[Method], bool] = lambda method: True) -> None:
    """One case. Raises Finding."""
    mutator = Mutator(seed)
    method = mutator.random.choice([method for method in methods() if only(method)])
    num_messages = mutator.random.choice((1, 1, 2, 5)) if method.descriptor.client_streaming else 1
    messages = [encoded(mutator, method) for _ in range(num_messages)]
    try:
        async with asyncio.timeout(CASE_TIMEOUT_S):
            error = await _call(
                line.channels[method.service], method, messages, reads=mutator.random.choice((0, 3, 99))
            )
    except TimeoutError as late:
        raise Finding(f"{method.name} has no end: {[data.hex() for data in messages]}") from late
    if error is not None and error.code() not in refusals() and not is_unreadable(error):
        raise Finding(f"{method.name}: {error.code()} {error.details()}: {[data.hex() for data in messages]}")


async def _call(
    channel: grpc.aio.Channel, method: Method, messages: list[bytes], reads: int
) -> grpc.aio.AioRpcError | None:
    """How it ends for a client that reads so many answers and leaves; None: it left."""
    call = channel.stream_stream(method.path)(timeout=10)
    try:
        for data in messages:
            await call.write(data)
        await call.done_writing()
        for _ in range(reads):
            if await call.read() is grpc.aio.EOF:
                break
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        pass  # it has ended: its status has the cause
    if not call.done():
        call.cancel()
        return None
    details = await call.details()
    return None if details == _WRITE_FAILED else _error(await call.code(), details)


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
