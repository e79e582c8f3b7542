"""The class `pagewire.LLM`."""

import asyncio
import atexit
import dataclasses
import sys
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Sized
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.json_format import MessageToDict

from pagewire import flags
from pagewire.client import Client
from pagewire.config import DEFAULT_MODEL, SET_BY_STACK, WITHOUT_TLS, ServeConfig
from pagewire.errors import StartupError
from pagewire.progress_line import ProgressLine
from pagewire.stack.address import grpc_address, unanswered
from pagewire.stack.own_stack import OwnStack
from pagewire.tools.llm.outputs import (
    Classification,
    ClassificationRequestOutput,
    Embedding,
    EmbeddingRequestOutput,
    PromptError,
    RequestOutput,
    Score,
    ScoringRequestOutput,
)
from pagewire.tools.llm.sampling import SamplingParams
from pagewire.tools.llm.window import Answer, Item, ask_all
from pagewire.wire.generate_request import GenerateOptions, Message
from pagewire.wire.rpc import RpcError

Result = TypeVar("Result")
Params = SamplingParams | Sequence[SamplingParams] | None

# The flags of the stack, without TLS, which a stack for only this program does not need.
_FIELDS = {f.name: f for f in dataclasses.fields(ServeConfig) if f.name not in (*SET_BY_STACK, *WITHOUT_TLS)}


class LLM:
    """A model for batch work: `with LLM("model") as llm: llm.generate(["Paging is"])`.

    Starts the stack (without REST) as separate processes, which end with close(), with the `with` block, or with the
    interpreter, even if it is killed; `address` names a running stack instead ("host:port" of its gRPC, with the prefix
    "grpcs://" for TLS). Calls block; they work in notebooks, in several threads, and inside a running event loop.
    Answers have the order of the prompts.

    serve: the flags of `pagewire serve` (max_model_len=4096, kv_cache_memory_bytes="4GiB").
    max_concurrency: prompts in flight; the others wait here, and a generator of prompts is read when there is room.
    progress: a line on standard error, or occasional lines if that is no terminal; None: only on a terminal.

    Raises StartupError if the stack cannot be started or reached, TypeError for a flag that does not exist.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        address: str | None = None,
        max_concurrency: int = 256,
        progress: bool | None = None,
        **serve: Any,
    ) -> None:
        if address is not None and serve:
            raise TypeError(f"{', '.join(serve)}: only for a new stack, which address= does not start")
        self._window = max_concurrency
        self._progress = progress
        self._stack = None if address is not None else OwnStack(_config(model, serve), _echo, with_rest=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagewire-llm", daemon=True)
        self._thread.start()
        self._client: Client | None = None
        atexit.register(self.close)
        try:
            if self._stack is not None:
                self._stack.await_ready()
            self._client = self._run(_connected(address or self._stack.grpc))  # type: ignore[union-attr]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stack, if this object started it. Safe to call twice."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            if self._client is not None:
                self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        if self._stack is not None:
            self._stack.close()

    def generate(
        self,
        prompts: str | Iterable[str | Sequence[int]],
        sampling_params: Params = None,
        *,
        return_errors: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Completes texts, or lists of token ids. sampling_params: one for all prompts, or one for each.

        return_errors: a prompt that fails has an `error` and no outputs; otherwise the first one is raised, as
        PromptError, once all are done. options: those of `Client.generate`, for instance cache_salt.
        """
        return self._outputs(
            [prompts] if isinstance(prompts, str) else prompts, sampling_params, return_errors, options
        )

    def chat(
        self,
        conversations: Sequence[Message] | Iterable[Sequence[Message]],
        sampling_params: Params = None,
        *,
        return_errors: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one or more conversations: lists of {"role": ..., "content": ...}. options: tools, reasoning,
        chat_template_kwargs and other fields of `ChatOptions`; the rest is as in generate()."""
        if isinstance(conversations, Sequence) and conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]  # type: ignore[list-item]
        return self._outputs(conversations, sampling_params, return_errors, options)  # type: ignore[arg-type]

    def embed(self, texts: str | Iterable[str | Sequence[int]], **options: Any) -> list[EmbeddingRequestOutput]:
        """Returns `.outputs.embedding` of each text. options: those of `Client.embed`."""

        async def ask(text: str | Sequence[int]) -> EmbeddingRequestOutput:
            [vector] = await self._connected().embed([text], **options)
            return EmbeddingRequestOutput(Embedding(vector))

        return self._all([texts] if isinstance(texts, str) else texts, ask, "texts")

    def classify(
        self, texts: str | Iterable[str | tuple[str, str]], **options: Any
    ) -> list[ClassificationRequestOutput]:
        """Returns `.outputs.probs` of each text or pair of texts. options: those of `Client.classify`."""

        async def ask(text: str | tuple[str, str]) -> ClassificationRequestOutput:
            [scores] = await self._connected().classify([text], **options)
            return ClassificationRequestOutput(Classification(list(scores.values()), list(scores)))

        return self._all([texts] if isinstance(texts, str) else texts, ask, "texts")

    def score(
        self, query: str | Sequence[str], docs: str | Sequence[str], **options: Any
    ) -> list[ScoringRequestOutput]:
        """Returns `.outputs.score`: how well each document answers the query, or the query at the same index.

        options: those of `Client.score`. Raises ValueError for lists of different lengths.
        """
        docs = [docs] if isinstance(docs, str) else docs
        queries = [query] * len(docs) if isinstance(query, str) else query
        if len(queries) != len(docs):
            raise ValueError(f"{len(queries)} queries and {len(docs)} documents: give one query, or one for each")

        async def ask(pair: tuple[str, str]) -> ScoringRequestOutput:
            [score] = await self._connected().score([pair], **options)
            return ScoringRequestOutput(Score(score))

        return self._all(list(zip(queries, docs, strict=True)), ask, "pairs")

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that prompts get where they name none: the model's, or those of the stack's flags."""
        models = self._run(self._connected().models())
        return SamplingParams(**MessageToDict(models[0].default_sampling_params, preserving_proto_field_name=True))

    def _outputs(
        self, prompts: Iterable[Any], params: Params, return_errors: bool, options: dict[str, Any]
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            same = params or SamplingParams()
            items = ((prompt, same) for prompt in prompts)
            length = _length(prompts)
        else:
            prompts = list(prompts)
            if len(prompts) != len(params):
                raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling_params: give one, or one for each")
            items = ((prompt, own) for prompt, own in zip(prompts, params, strict=True))
            length = len(prompts)

        async def ask(item: tuple[Any, SamplingParams]) -> RequestOutput:
            prompt, own = item
            output = RequestOutput(prompt)
            given: GenerateOptions = {**own.options(), **options}  # type: ignore[typeddict-item]
            async for response in self._connected().generate(prompt, **given):
                output.add(response)
            return output

        answers = self._ask(items, ask, "prompts", length)
        if not return_errors:
            return _raising(answers)
        return [RequestOutput(a.item[0], error=a) if isinstance(a, PromptError) else a for a in answers]  # type: ignore[index]

    def _all(self, items: Iterable[Item], ask: Any, unit: str) -> list[Any]:
        return _raising(self._ask(items, ask, unit, _length(items)))

    def _ask(self, items: Iterable[Item], ask: Any, unit: str, length: int) -> list[Any]:
        with ProgressLine(length, unit, self._progress) as progress:
            return self._run(ask_all(items, ask, self._window, progress))

    def _connected(self) -> Client:
        if self._client is None:
            raise RuntimeError("this LLM is closed")
        return self._client

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` on the loop's thread, from any thread. Ctrl-C ends it."""
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


async def _connected(address: str) -> Client:
    address = grpc_address(address)
    client = Client(address)
    try:
        await client.models()
    except RpcError as error:
        await client.close()
        raise StartupError(unanswered(address, error.message)) from error
    return client


def _raising(answers: list[Answer | PromptError]) -> list[Answer]:
    for answer in answers:
        if isinstance(answer, PromptError):
            raise answer
    return answers  # type: ignore[return-value]


def _length(items: Iterable[Any]) -> int:
    """Returns the length; 0 if it is unknown."""
    return len(items) if isinstance(items, Sized) else 0


def _config(model: str, serve: Mapping[str, Any]) -> ServeConfig:
    """Returns the configuration. Raises TypeError for an unknown flag, StartupError for one that has a bad value or is
    refused."""
    for name in serve:
        if name not in _FIELDS and not flags.is_of_vllm(name):
            match = flags.nearest(name, _FIELDS)
            raise TypeError(f"pagewire serve has no flag {name}" + (f"; did you mean {match}?" if match else ""))
    try:
        values, lines = flags.of_keywords(_FIELDS, serve)
    except flags.UsageError as error:
        raise StartupError(str(error)) from error
    for line in lines:
        _echo(f"pagewire.LLM: {line}")
    return ServeConfig(**{"log_level": "warning", "port": 0, "grpc_port": 0, **values, "model": model})


def _echo(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
