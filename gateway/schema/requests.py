"""What clients send: OpenAI's request bodies with vLLM's extensions.

Every parameter may be null, which means unset; defaults are those of the services that apply them. Sampling parameters
are those of the table in `pagewire.config.sampling_params`.

Responses are msgspec's, requests pydantic's: a response is encoded for each token, while a request is read once and has
to be refused by name, with every violation of the parameter at fault. msgspec reports the first violation only and
cannot tell [1, 2] from ["a", "b"] in a union.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model, model_validator

from pagewire.config.sampling_params import INT32_MAX, LENGTH_PENALTY, MAX_BAD_WORDS, MAX_CHOICES
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.schema.chat_messages import ChatPromptParameters, Messages
from pagewire.gateway.schema.field import Off, RequestId, field, required
from pagewire.gateway.schema.functions import FunctionChoice, functions_to_tools
from pagewire.gateway.schema.parameters import (
    LABEL,
    MODEL,
    CacheSalt,
    LogitBias,
    Parameters,
    Prompts,
    StopString,
    TokenId,
)
from pagewire.gateway.schema.sampling import EAGER, sampling_fields
from pagewire.gateway.schema.sglang import SglangParameters
from pagewire.gateway.schema.structured import Choices, ResponseFormat, Schema, StructuredOutputs
from pagewire.gateway.schema.tools import Function, ToolChoice

# Texts of one request to /tokenize: they are read one after the other.
MAX_TOKENIZED = 1024


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = field("gateway", "One more chunk at the end, with `usage` and no choices.", False)
    continuous_usage_stats: bool | None = field(
        "gateway", "With `include_usage`: in each chunk the usage so far.", False
    )
    include_obfuscation: Off | None = field("gateway", "Padding against eavesdroppers is not offered.", False)


SamplingParameters = create_model("SamplingParameters", __base__=Parameters, **sampling_fields())


class GenerationParameters(SamplingParameters, SglangParameters):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """What chat and completions share."""

    model: str | None = field("tokenizer", MODEL)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = field(
        "gateway",
        "Choices for each prompt, with the seeds `seed`, `seed` + 1, ...; each runs as a request of its own.",
        1,
    )
    use_beam_search: bool | None = field(
        "tokenizer", "Search for the `n` most probable outputs instead of sampling. Not with `stream`.", False
    )
    length_penalty: Annotated[float, Field(ge=LENGTH_PENALTY.minimum, le=LENGTH_PENALTY.maximum)] | None = field(
        "tokenizer",
        "Of beam search: an output's log probability is divided by its length to this power.",
        1,
    )
    early_stopping: bool | None = field("tokenizer", "Of beam search: end as soon as `n` outputs have ended.", False)
    stream: bool | None = field("gateway", "Send events as the output grows.", False)
    stream_options: StreamOptions | None = field("gateway", "Only with `stream`.")
    logit_bias: LogitBias | None = field(
        "executor", "Token ids in decimal -> -100 to 100, added to their logits. " + EAGER
    )
    stop: StopString | list[StopString] | None = field(
        "tokenizer", "Strings that end the output, which stops before them.", union_mode="left_to_right"
    )
    stop_token_ids: list[TokenId] | None = field("scheduler", "Tokens that end the output; their text is left out.")
    allowed_token_ids: list[TokenId] | None = field(
        "executor", "Only these are sampled; end tokens belong to them, or the output ends at `max_tokens`. " + EAGER
    )
    bad_words: list[Annotated[str, StringConstraints(min_length=1)]] | None = field(
        "tokenizer", f"Words that the output does not contain, at most {MAX_BAD_WORDS}. " + EAGER
    )
    include_stop_str_in_output: bool | None = field("tokenizer", "Keep the stop string in the output.", False)
    skip_special_tokens: bool | None = field("tokenizer", "Leave special tokens out of the text.", True)
    spaces_between_special_tokens: bool | None = field(
        "tokenizer", "Special tokens are written as they are, without spaces between them, whatever it says."
    )
    return_tokens_as_token_ids: bool | None = field(
        "gateway", "Log probabilities name tokens `token_id:123`, so that different ones never look alike.", False
    )
    return_token_ids: bool | None = field("gateway", "Add `prompt_token_ids` and `token_ids` to the answer.", False)
    # What the output looks like; at most one of them says it.
    response_format: ResponseFormat | None = field(
        "executor", "The form of the output, which is sampled to keep to it. At most one parameter may say a form."
    )
    structured_outputs: StructuredOutputs | None = field("executor", "vLLM's way to say the form.")
    guided_json: str | Schema | None = field("executor", "vLLM's older way to say it: a JSON schema.")
    guided_regex: str | None = field("executor", "A regular expression (Rust's syntax) for the whole output.")
    guided_choice: Choices | None = field("executor", "Texts of which the output is one.")
    guided_grammar: str | None = field("executor", "A grammar, as GBNF or Lark.")
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = field(
        "executor",
        "Most tokens of reasoning, which is closed then; -1: any number. Needs a known `--reasoning-parser`. " + EAGER,
        -1,
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = field(
        "tokenizer",
        "Keep so many tokens of a longer prompt, -1: what the model takes. Unset: too long a prompt is refused.",
    )
    truncation_side: Literal["left", "right"] | None = field("tokenizer", "Which end is cut off.", "left")
    cache_salt: CacheSalt | None = field("scheduler", "The prefix cache is shared only with requests of the same salt.")
    request_id: RequestId | None = field("gateway", "Takes precedence over `X-Request-Id`; ends the answer's `id`.")
    user: str | None = field("gateway", LABEL)
    metadata: dict[str, Any] | None = field("gateway", LABEL)
    safety_identifier: str | None = field("gateway", LABEL)
    prompt_cache_key: str | None = field("gateway", LABEL)
    session_id: str | None = field("gateway", LABEL)
    custom_labels: dict[str, str] | None = field("gateway", LABEL)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationParameters":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_are_whole(self) -> "GenerationParameters":
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs are not available with stream: true", param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _beams_are_whole(self) -> "GenerationParameters":
        if self.use_beam_search and self.stream:
            message = "the best outputs are known when the search has ended; leave out use_beam_search, or stream"
            raise ApiError(400, message, param="use_beam_search")
        if not self.use_beam_search and self.length_penalty not in (None, 1):
            raise ApiError(400, "length_penalty is for use_beam_search", param="length_penalty")
        if not self.use_beam_search and self.early_stopping:
            raise ApiError(400, "early_stopping is for use_beam_search", param="early_stopping")
        return self


class ChatCompletionRequest(GenerationParameters, ChatPromptParameters):
    messages: Messages = required("tokenizer", "The conversation.")
    tool_choice: ToolChoice | None = field(
        "tokenizer",
        "`none` does not show the tools, `allowed_tools` some. `required` or a name: a grammar holds the output to "
        "calls, of any model.",
        "auto",
    )
    parallel_tool_calls: bool | None = field("tokenizer", "false: all calls but the first are left out.", True)
    functions: list[Function] | None = field(
        "tokenizer", "Older form of `tools`. The answer has a `function_call`, of one function."
    )
    function_call: FunctionChoice | None = field("tokenizer", "Older form of `tool_choice`.", "auto")
    include_reasoning: bool | None = field("gateway", "false: `reasoning` is left out of the answer.", True)
    separate_reasoning: bool | None = field(
        "tokenizer",
        "false: the reasoning stays in `content`, with its marks; a form begins with the first token.",
        True,
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = field(
        "gateway", "All requests are served alike: the answer says `default`. See `priority`.", "auto"
    )
    store: bool | None = field("gateway", "Chats are not stored, whatever it says.", False)
    prediction: dict[str, Any] | None = field("gateway", "A hint at the output that nothing makes use of.")
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "scheduler", "Newer name of `max_tokens`."
    )
    # Of the wire's logprobs: whether, and how many.
    logprobs: bool | None = field("executor", f"Log probabilities of the output's tokens. {EAGER}", False)
    top_logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor", "With `logprobs`: that many of the most probable tokens, at most 20.", 0
    )

    @model_validator(mode="after")
    def _functions_are_tools(self) -> "ChatCompletionRequest":
        functions_to_tools(self)
        return self


class CompletionRequest(GenerationParameters):
    prompt: Prompts = required("tokenizer", "One or several, each as text or token ids.")
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = field(
        "tokenizer",
        "Of so many outputs, the `n` with the highest mean log probability. More than `n` not with `stream`.",
    )
    add_special_tokens: bool | None = field("tokenizer", "Add BOS and the like to prompts given as text.", True)
    echo: bool | None = field(
        "gateway",
        "Each choice begins with its prompt; with `logprobs`, these too, computed like `prompt_logprobs`.",
        False,
    )
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "scheduler", "Longest output. 0 only with `echo`: nothing but the prompt.", 16
    )

    @model_validator(mode="after")
    def _best_of_samples(self) -> "CompletionRequest":
        if self.use_beam_search and self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "beam search finds the n best of all outputs; leave out best_of", param="best_of")
        return self

    @model_validator(mode="after")
    def _best_of_at_least_n(self) -> "CompletionRequest":
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise ApiError(400, f"best_of is {self.best_of}, less than n, which is {n}", param="best_of")
        if self.best_of is not None and self.best_of > n and self.stream:
            message = "the best outputs are known when all have ended; leave out best_of, or stream"
            raise ApiError(400, message, param="best_of")
        return self

    @model_validator(mode="after")
    def _there_is_something_to_say(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0; it must be >= 1, or echo true", param="max_tokens")
        return self


class TokenizeRequest(ChatPromptParameters):
    """Either prompt or messages."""

    model: str | None = field("tokenizer", MODEL)
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TOKENIZED)] | None = field(
        "tokenizer", "A text; or several, which are answered with lists.", union_mode="left_to_right"
    )
    messages: Messages | None = field("tokenizer", "Or a conversation, as the chat template writes it.")
    return_token_strs: bool | None = field("tokenizer", "Also the text of each token.", False)


class DetokenizeRequest(Parameters):
    model: str | None = field("tokenizer", MODEL)
    tokens: list[TokenId] | Annotated[list[list[TokenId]], Field(max_length=MAX_TOKENIZED)] = required(
        "tokenizer", "Token ids; or lists of them, which are answered with a list.", union_mode="left_to_right"
    )
    skip_special_tokens: bool | None = field("tokenizer", "Leave special tokens out of the text.", False)
