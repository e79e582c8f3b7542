"""The outputs of `pagewire.LLM`; the names are vLLM's."""

from dataclasses import dataclass, field

from pagewire.v1 import common_pb2, inference_pb2


@dataclass
class Logprob:
    """One log probability. vLLM's rank is missing, because it is not known here."""

    logprob: float
    decoded_token: str


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


@dataclass
class RequestOutput:
    """All outputs of a request. error: why there are no outputs, if the caller set return_errors."""

    prompt: object
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: "PromptError | None" = None

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Adds the next part of one of the outputs."""
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
    output.logprobs.append({t.token_id: Logprob(t.logprob, t.token) for t in (token, *token.top_logprobs)})
    output.cumulative_logprob = (output.cumulative_logprob or 0.0) + token.logprob


@dataclass
class Embedding:
    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    outputs: Embedding


@dataclass
class Classification:
    """The classes of a text. probs: in the order of `labels`."""

    probs: list[float]
    labels: list[str]


@dataclass
class ClassificationRequestOutput:
    outputs: Classification


@dataclass
class Score:
    score: float


@dataclass
class ScoringRequestOutput:
    outputs: Score


class PromptError(Exception):
    """Raised if the prompt with this index was not answered; `code` is the gRPC status, for instance
    INVALID_ARGUMENT."""

    def __init__(self, index: int, code: str, message: str, item: object = None) -> None:
        """item: the prompt."""
        super().__init__(f"prompt {index}: {message} ({code})")
        self.index = index
        self.code = code
        self.item = item
