"""The class `pagewire.LLM`."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from google.protobuf.json_format import MessageToDict

from pagewire.config import DEFAULT_MODEL
from pagewire.tools.llm.batches import Adapters, Batches, raising, tensor
from pagewire.tools.llm.connection import Connection
from pagewire.tools.llm.outputs import (
    BeamSearchOutput,
    Classification,
    ClassificationRequestOutput,
    Embedding,
    EmbeddingRequestOutput,
    Pooling,
    PoolingRequestOutput,
    PromptError,
    RequestOutput,
    Score,
    ScoringRequestOutput,
)
from pagewire.tools.llm.progress import Progress
from pagewire.tools.llm.prompts import PoolingParams, as_prompts, client_options, length
from pagewire.tools.llm.sampling import BeamSearchParams, SamplingParams
from pagewire.tools.llm.stack_flags import config_of
from pagewire.tools.llm.tokenizer import Tokenizer
from pagewire.v1.inference_pb2 import BeamSearch
from pagewire.wire.generate_request import Message

Params = SamplingParams | Sequence[SamplingParams] | None

_MOST_ALTERNATIVES = 20  # which a stack returns to each token, without --max-logprobs
_TAGS = {"weights", "kv_cache"}
# Methods of vLLM's class, and why they are not here.
_NOT_SERVED = {
    **dict.fromkeys(("apply_model", "collective_rpc"), "functions of the program do not run in the executors"),
    **dict.fromkeys(
        ("enqueue", "enqueue_chat", "wait_for_completion"),
        "generate() and chat() take all prompts at once, also from a generator",
    ),
    **dict.fromkeys(("start_profile", "stop_profile"), "docs/operations.md names the means to measure a stack"),
    "get_metrics": "`pagewire serve` has them at /metrics",
    "llm_engine": "the engine runs in processes of its own",
    "reward": "classify() returns the scores of a reward model",
    "set_tokenizer": "name the files of another tokenizer when the stack starts: LLM(..., tokenizer=...)",
}


class LLM:
    """A model for batch work: `with LLM("model") as llm: llm.generate(["Paging is"])`.

    Starts the stack (without REST) as separate processes. They end with close(), with the `with` block, when nothing
    refers to the object any more, and with the program, even if it is killed. `address` names a running stack instead
    ("host:port" of its gRPC, with the prefix "grpcs://" for TLS), and `model` one of its models. Calls block; they work
    in notebooks, in several threads, and inside a running event loop. Answers have the order of the prompts.

    serve: the flags of `pagewire serve` (max_model_len=4096, kv_cache_memory_bytes="4GiB"), also those of vLLM.
    max_concurrency: prompts in flight; the others wait here, and a generator of prompts is read when there is room.
    progress: a line on standard error, or occasional lines if that is no terminal; None: only on a terminal.

    All calls that take prompts take these options of vLLM as well: use_tqdm, instead of `progress`; lora_request: one
    adapter, or one for each prompt, which is loaded if it has a path; tokenization_kwargs.

    Raises StartupError if the stack cannot be started or reached, TypeError for a flag that does not exist.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        address: str | None = None,
        max_concurrency: int = 256,
        progress: bool | None = None,
        **serve: Any,
    ) -> None:
        if address is not None and serve:
            raise TypeError(f"{', '.join(serve)}: only for a new stack, which address= does not start")
        config = None if address is not None else config_of(model or DEFAULT_MODEL, serve)
        self._connection = Connection(address, config, model or "")
        self._batches = Batches(self._connection, max_concurrency, progress)
        # Also at the end of the interpreter. It holds the connection alone, so that this object can be collected.
        self._finalizer = weakref.finalize(self, self._connection.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stack, if this object started it. Safe to call twice."""
        self._finalizer()

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, with the remedy for a method of vLLM."""
        why = f": {_NOT_SERVED[name]}" if name in _NOT_SERVED else ""
        raise AttributeError(f"LLM has no {name}{why}")

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: Progress = None,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
        return_errors: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Completes prompts: texts, lists of token ids, {"prompt": ...} or {"prompt_token_ids": ...}. sampling_params:
        one for all prompts, or one for each; priority: one for each.

        return_errors: a prompt that fails has an `error` and no outputs; otherwise the first one is raised, as
        PromptError, once all are done. options: those of `Client.generate`, for instance cache_salt.
        """
        prompts, options = as_prompts(prompts), client_options(options)
        batches = self._batches
        items = batches.items(prompts, sampling_params=sampling_params, lora_request=lora_request, priority=priority)
        answers = batches.ask(items, batches.generator(options), use_tqdm, "prompts", length(prompts))
        if not return_errors:
            return raising(answers)
        return [RequestOutput(a.item["prompt"], error=a) if isinstance(a, PromptError) else a for a in answers]  # type: ignore[index]

    def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: Progress = None,
        lora_request: Adapters = None,
        *,
        return_errors: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one or more conversations: lists of {"role": ..., "content": ...}. options: tools, reasoning,
        chat_template, chat_template_kwargs and other fields of `ChatOptions`; the rest is as in generate()."""
        if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping):
            messages = [messages]  # type: ignore[list-item]
        return self.generate(
            messages,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            return_errors=return_errors,
            **options,
        )

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Returns the beam_width most probable outputs of each prompt, the best first.

        The search is that of transformers' generate(), not vLLM's: an output's score counts its own tokens, not those
        of the prompt, and the search stops once no better output is expected. concurrency_limit: prompts in flight.
        """
        if concurrency_limit is not None and concurrency_limit < 1:
            raise ValueError(f"concurrency_limit is {concurrency_limit}; it must be >= 1")
        prompts = as_prompts(prompts)
        sampling = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            logprobs=min(2 * params.beam_width, _MOST_ALTERNATIVES),
        )
        search = self._batches.searcher({"beam_search": BeamSearch(length_penalty=params.length_penalty)})
        items = self._batches.items(prompts, sampling_params=sampling, lora_request=lora_request, priority=None)
        return raising(self._batches.ask(items, search, use_tqdm, "prompts", length(prompts), concurrency_limit))

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: Progress = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Returns `.outputs.embedding` of each text. options: those of `Client.embed`."""

        async def ask(text: Any, **own: Any) -> EmbeddingRequestOutput:
            [vector] = await self._connection.client.embed([text], **own)
            return EmbeddingRequestOutput(Embedding(vector))

        return self._batches.numbers(as_prompts(prompts), ask, use_tqdm, pooling_params, lora_request, options)

    def classify(
        self,
        prompts: Any,
        *,
        use_tqdm: Progress = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: Adapters = None,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """Returns `.outputs.probs` of each text or pair of texts. options: those of `Client.classify`."""

        async def ask(text: Any, **own: Any) -> ClassificationRequestOutput:
            [scores] = await self._connection.client.classify([text], **own)
            return ClassificationRequestOutput(Classification(list(scores.values()), list(scores)))

        return self._batches.numbers(as_prompts(prompts), ask, use_tqdm, pooling_params, lora_request, options)

    def score(
        self,
        query: str | Sequence[str],
        docs: str | Sequence[str],
        /,
        *,
        use_tqdm: Progress = None,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Returns `.outputs.score`: how well each document answers the query, or the query at the same index.

        options: those of `Client.score`. Raises ValueError for lists of different lengths.
        """
        docs = [docs] if isinstance(docs, str) else docs
        queries = [query] * len(docs) if isinstance(query, str) else query
        queries = list(queries) * len(docs) if len(queries) == 1 else queries
        if len(queries) != len(docs):
            raise ValueError(f"{len(queries)} queries and {len(docs)} documents: give one query, or one for each")

        async def ask(pair: tuple[str, str], **own: Any) -> ScoringRequestOutput:
            [score] = await self._connection.client.score([pair], **own)
            return ScoringRequestOutput(Score(score))

        pairs = list(zip(queries, docs, strict=True))
        return self._batches.numbers(pairs, ask, use_tqdm, pooling_params, lora_request, options)

    def encode(
        self, prompts: Any, pooling_params: Any = None, *, pooling_task: str | None = None, **options: Any
    ) -> list[PoolingRequestOutput]:
        """Returns `.outputs.data` of each text, by pooling_task: the vector ("embed") or the scores of the labels
        ("classify"). The rest is as in embed(). Raises ValueError for another task."""
        numbers: list[list[float]]
        if pooling_task == "embed":
            embedded = self.embed(prompts, pooling_params=pooling_params, **options)
            numbers = [one.outputs.embedding for one in embedded]
        elif pooling_task == "classify":
            numbers = [one.outputs.probs for one in self.classify(prompts, pooling_params=pooling_params, **options)]
        else:
            why = "vectors and scores of single tokens are not served" if pooling_task else "name the task"
            raise ValueError(f"pooling_task is {pooling_task!r}; it must be 'embed' or 'classify': {why}")
        return [PoolingRequestOutput(Pooling(tensor(one))) for one in numbers]

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that prompts get where they name none: the model's, or those of the stack's flags."""
        models = self._connection.run(self._connection.client.models())
        return SamplingParams(**MessageToDict(models[0].default_sampling_params, preserving_proto_field_name=True))

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the stack."""
        return Tokenizer(self._connection)

    def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Gives the memory of the model back, until wake_up(). level: 1 keeps the weights at hand, in host memory or
        packed on disk, 2 drops them. mode: what becomes of requests of other threads: "wait" lets them end first,
        "keep" continues them after the wake, "abort" ends them. Raises ValueError for others."""
        if level not in (1, 2) or mode not in ("wait", "keep", "abort"):
            raise ValueError(f"sleep(level={level!r}, mode={mode!r}): level is 1 or 2, and mode wait, keep or abort")
        self._connection.run(self._connection.client.sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Wakes the model, and returns once it takes prompts. tags: vLLM's "weights" and "kv_cache", which come back
        together, whichever is named first. Raises ValueError for others."""
        if unknown := set(tags or ()) - _TAGS:
            raise ValueError(f"tags has {', '.join(sorted(unknown))}; there are {' and '.join(sorted(_TAGS))}")
        self._connection.run(self._connection.client.wake())

    def reset_prefix_cache(self) -> bool:
        """Makes later prompts find nothing that was computed before. Returns True, as vLLM does."""
        self._connection.run(self._connection.client.reset_prefix_cache())
        return True
