"""The outputs of `pagewire.LLM`; the names are vLLM's."""

from dataclasses import dataclass, field
from typing import Any

from pagewire.v1 import common_pb2, inference_pb2


@dataclass
class Logprob:
    """One log probability. rank: 1 for the most probable token; None if it is not among the alternatives."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class ToolCall:
    """A tool call. arguments: JSON, as the model wrote it."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class CompletionOutput:
    """One output. finish_reason: "stop", "length", "tool_calls" or "abort". stop_reason: the stop string or token that
    ended it. logprobs: of each token and its alternatives, by token id, if asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    lora_request: object = None

    def finished(self) -> bool:
        """Returns whether it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """All outputs of a request. prompt_logprobs: of each token of the prompt, None for the first, if asked for. error:
    why there are no outputs, if the caller set return_errors."""

    prompt: object
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: "PromptError | None" = None
    request_id: str = ""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    lora_request: object = None
    metrics: None = None

    @property
    def finished(self) -> bool:
        """Returns whether all outputs have ended."""
        return bool(self.outputs) and all(output.finished() for output in self.outputs)

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Adds the next part of one of the outputs."""
        self.request_id = self.request_id or response.request_id
        if response.HasField("prompt_logprobs"):
            self.prompt_logprobs = _of_prompt(response.prompt_logprobs)
        if response.prompt_token_ids:
            self.prompt_token_ids = list(response.prompt_token_ids)
        while len(self.outputs) <= response.index:
            self.outputs.append(CompletionOutput(len(self.outputs)))
        output = self.outputs[response.index]
        output.text += response.text
        output.token_ids += response.token_ids
        output.reasoning += response.reasoning
        self.num_cached_tokens = max(self.num_cached_tokens, response.usage.cached_tokens)
        for delta in response.tool_calls:
            _add_call(output.tool_calls, delta)
        for token in response.logprobs:
            _add_logprob(output, token)
        if response.finish_reason:
            name = common_pb2.FinishReason.Name(response.finish_reason)
            output.finish_reason = name.removeprefix("FINISH_REASON_").lower()
            if reason := response.WhichOneof("stop_reason"):
                output.stop_reason = getattr(response, reason)


def _add_call(calls: list[ToolCall], delta: inference_pb2.ToolCallDelta) -> None:
    while len(calls) <= delta.index:
        calls.append(ToolCall())
    call = calls[delta.index]
    call.id, call.name = call.id or delta.id, call.name or delta.name
    call.arguments += delta.arguments


def _add_logprob(output: CompletionOutput, token: inference_pb2.TokenLogprob) -> None:
    if output.logprobs is None:
        output.logprobs, output.cumulative_logprob = [], 0.0
    ranked = {t.token_id: Logprob(t.logprob, rank, t.token) for rank, t in enumerate(token.top_logprobs, 1)}
    output.logprobs.append({token.token_id: Logprob(token.logprob, None, token.token)} | ranked)
    output.cumulative_logprob = (output.cumulative_logprob or 0.0) + token.logprob


def _of_prompt(found: inference_pb2.PromptLogprobs) -> list[dict[int, Logprob] | None]:
    """Returns the entries of each token of the prompt, by token id; the first of a token's entries is its own."""
    columns, texts = found.logprobs, found.tokens
    of_tokens: list[dict[int, Logprob] | None] = [None]
    width = columns.entries_per_token
    for token, own_rank in enumerate(columns.ranks):
        entries: dict[int, Logprob] = {}
        for rank in range(width):
            i = token * width + rank
            entry = Logprob(columns.logprobs[i], rank or own_rank, texts[i])
            entries.setdefault(columns.token_ids[i], entry)
        of_tokens.append(entries)
    return of_tokens


@dataclass
class Embedding:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of its values."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    outputs: Embedding


@dataclass
class Classification:
    """The classes of a text. probs: in the order of `labels`."""

    probs: list[float]
    labels: list[str]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass
class ClassificationRequestOutput:
    outputs: Classification


@dataclass
class Score:
    score: float


@dataclass
class ScoringRequestOutput:
    outputs: Score


@dataclass
class Pooling:
    """The numbers of a text. data: a `torch.Tensor` if PyTorch is installed, else a list."""

    data: Any


@dataclass
class PoolingRequestOutput:
    outputs: Pooling


@dataclass
class BeamSearchSequence:
    """An output of a search. tokens: those of the prompt and of the output; text: theirs. logprobs: of each token of
    the output and of its alternatives, by token id. cum_logprob: of the tokens of the output together."""

    orig_prompt: object
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    lora_request: object = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The outputs of a search, the best first."""

    sequences: list[BeamSearchSequence]


class PromptError(Exception):
    """Raised if the prompt with this index was not answered; `code` is the gRPC status, for instance
    INVALID_ARGUMENT."""

    def __init__(self, index: int, code: str, message: str, item: object = None) -> None:
        """item: the prompt."""
        super().__init__(f"prompt {index}: {message} ({code})")
        self.index = index
        self.code = code
        self.item = item
