"""The line that is fuzzed: all services but the model, in this process, and what must hold after each case."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import httpx

from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.templates.turns import fit_turns
from pagewire.v1 import inference_pb2
from pagewire.v1.admin_pb2 import WakeModelRequest
from pagewire.v1.admin_pb2_grpc import AdminServiceStub
from pagewire.wire import rpc
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.gateway.conftest import running_gateway, wait_ready
from tests.services.scheduler.service_line import ServiceLine
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine

CASE_TIMEOUT_S = 30.0
MAX_MODEL_LEN = 512
_VALID = inference_pb2.GenerateRequest(text="The capital of France is")
_VALID.sampling_params.max_tokens = 4


class Finding(AssertionError):
    """Something that no request may cause."""


class _Errors(logging.Handler):
    """What services log when something unforeseen happens."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@dataclass
class FuzzLine:
    """A line: gateway -> tokenizer -> scheduler -> fake executor, for the vocabulary of the built-in model."""

    http: httpx.AsyncClient
    tokenizer: TokenizerLine
    scheduler: ServiceLine
    _errors: _Errors = field(default_factory=_Errors)
    _num_streams: int = 1

    @property
    def channels(self) -> dict[str, grpc.aio.Channel]:
        """Returns the logged errors by service."""
        return {"tokenizer": self.tokenizer.channel, "scheduler": self.scheduler.channel}

    async def check(self) -> None:
        """Checks after a case: no service has logged an error, nothing is held, a valid request is answered, and no
        step broke what an executor may rely on. Raises Finding."""
        try:
            async with asyncio.timeout(CASE_TIMEOUT_S):
                # A case may have put the model to sleep.
                await AdminServiceStub(self.scheduler.channel).WakeModel(WakeModelRequest())
                answer = [response async for response in self.tokenizer.stub.Generate(_VALID)]
                await self.scheduler.wait_until_free()
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            raise Finding(f"a valid request afterwards: {type(error).__name__} {error}") from error
        if sum(len(response.token_ids) for response in answer) != _VALID.sampling_params.max_tokens:
            raise Finding(f"a valid request afterwards is answered with {answer}")
        if self._errors.records:
            record = self._errors.records[0]
            self._errors.records.clear()
            raise Finding(f"logged: {record.name}: {logging.Formatter().format(record)}")
        if self.scheduler.executor.sleeps:
            self.scheduler.executor.sleeps.clear()
            self._num_streams = self.scheduler.executor.num_streams
        if self.scheduler.executor.num_streams != self._num_streams:
            self._num_streams = self.scheduler.executor.num_streams
            raise Finding("the executor was sent a step that it could not execute")


@asynccontextmanager
async def running_line(directory: Path, model: Path, pool: TokenizerPool | None = None) -> AsyncIterator[FuzzLine]:
    """Runs a line. pool: tokenizers that lines share."""
    make = partial(FakeExecutor, vocab_size=49_152, eos_token_ids=[EOS], max_num_seqs=16, max_num_batched_tokens=256)
    executor = FakeExecutorServicer(make, max_model_len=MAX_MODEL_LEN)
    scheduler = ServiceLine(directory, executor, name="scheduler")
    tokenizer = TokenizerLine(directory, FakeScheduler(lambda request: []), model, served_model_name="m")
    async with AsyncExitStack() as stack:
        if pool is None:
            source = FileSource(str(model), trust_request_chat_template=True, fit=fit_turns)
            pool = await asyncio.to_thread(TokenizerPool, source, size=1)
            stack.callback(pool.close)
        await stack.enter_async_context(scheduler.running())
        await stack.enter_async_context(tokenizer.running(with_scheduler=False, pool=pool))
        http = await stack.enter_async_context(running_gateway(tokenizer.config.listen, response_store_size=2**20))
        await wait_ready(http)
        line = FuzzLine(http, tokenizer, scheduler)
        for name in ("pagewire", "asyncio"):  # which reports errors of tasks that were never awaited
            logging.getLogger(name).addHandler(line._errors)
            stack.callback(logging.getLogger(name).removeHandler, line._errors)
        await line.check()
        yield line


def refusals() -> frozenset[grpc.StatusCode]:
    """Returns how a call that asks for nonsense may end."""
    code = grpc.StatusCode
    return frozenset(
        {code.OK, code.INVALID_ARGUMENT, code.NOT_FOUND, code.FAILED_PRECONDITION, code.OUT_OF_RANGE, code.ABORTED}
        | {code.RESOURCE_EXHAUSTED, code.DEADLINE_EXCEEDED, code.CANCELLED, code.UNIMPLEMENTED}
    )


def is_unreadable(error: rpc.RpcError | grpc.aio.AioRpcError) -> bool:
    """Returns whether an error says that the bytes are no message, for which gRPC has INTERNAL."""
    return "cannot be decoded" in str(error) or "deserializing" in str(error)
