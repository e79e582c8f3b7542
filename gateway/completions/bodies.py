"""The request and the answers of /v1/completions."""

from typing import Annotated, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from pagewire.config.sampling_params import INT32_MAX, MAX_CHOICES
from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.timing import RequestMetrics
from pagewire.gateway.schema.answers import FinishReason, PromptEntries, StopReason, UsageInfo
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.gateway.schema.parameters import Prompts


class CompletionRequest(GenerationParameters):
    prompt: Prompts = required("tokenizer", "One or several, each as text or token ids.")
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = field(
        "tokenizer",
        "Generate this many outputs and return the `n` with the highest mean log probability. Not streamed above `n`.",
    )
    suffix: str | None = field(
        "tokenizer",
        "Text after the output: a model of code fills in the middle between a prompt, given as text, and this.",
    )
    add_special_tokens: bool | None = field(
        "tokenizer", "Add special tokens such as BOS to prompts given as text.", True
    )
    echo: bool | None = field(
        "gateway",
        "Each choice begins with its prompt, with `logprobs` also its log probabilities, as `prompt_logprobs`.",
        False,
    )
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "scheduler", "Most tokens of the output. 0 only with `echo`: only the prompt.", 16
    )

    @model_validator(mode="after")
    def _best_of_samples(self) -> "CompletionRequest":
        if self.use_beam_search and self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "beam search returns the n best of all outputs; remove best_of", param="best_of")
        return self

    @model_validator(mode="after")
    def _best_of_at_least_n(self) -> "CompletionRequest":
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise ApiError(400, f"best_of is {self.best_of}, less than n, which is {n}", param="best_of")
        if self.best_of is not None and self.best_of > n and self.stream:
            message = "best_of cannot stream: the best outputs are known only at the end; remove best_of or stream"
            raise ApiError(400, message, param="best_of")
        return self

    @model_validator(mode="after")
    def _there_is_something_to_say(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0; it must be >= 1 unless echo is true", param="max_tokens")
        return self


# Answers.


class CompletionLogprobs(Body):
    """OpenAI's legacy columns, one entry for each token. `top_logprobs` includes the chosen token. The entry of the
    first token of a prompt (`echo`) is null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptEntries | None] | UnsetType | None = UNSET


class Completion(Body, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: UsageInfo
    metrics: RequestMetrics | UnsetType | None = UNSET


class CompletionChunkChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Body, kw_only=True):
    """One event of a streamed completion. With `include_usage` the last one has the usage and no choices."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType | None = UNSET
