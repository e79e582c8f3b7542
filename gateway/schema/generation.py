"""The parameters that the APIs which generate share: OpenAI's, with vLLM's extensions.

Every parameter may be null, which means unset; defaults are those of the services that apply them. Sampling parameters
are those of the table in `pagewire.config.sampling_params`.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model, model_validator

from pagewire.config.sampling_params import INT32_MAX, LENGTH_PENALTY, MAX_BAD_WORDS, MAX_CHOICES
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.schema.field import Off, RequestId, field
from pagewire.gateway.schema.parameters import (
    LABEL,
    MODEL,
    CacheSalt,
    LogitBias,
    Parameters,
    StopString,
    StopStrings,
    TokenId,
)
from pagewire.gateway.schema.sampling import EAGER, sampling_fields
from pagewire.gateway.schema.sglang import SglangParameters
from pagewire.gateway.schema.structured import Choices, ResponseFormat, Schema, StructuredOutputs


class StreamOptions(BoundedModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = field("gateway", "One more chunk at the end, with `usage` and no choices.", False)
    continuous_usage_stats: bool | None = field(
        "gateway", "With `include_usage`: in each chunk the usage so far.", False
    )
    include_obfuscation: Off | None = field("gateway", "Padding against eavesdropping is not supported.", False)


SamplingParameters = create_model("SamplingParameters", __base__=Parameters, **sampling_fields())


class GenerationParameters(SamplingParameters, SglangParameters):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """The parameters of all APIs that generate."""

    model: str | None = field("tokenizer", MODEL)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = field(
        "gateway",
        "Number of choices for each prompt, with the seeds `seed`, `seed` + 1, ...; each runs as its own request.",
        1,
    )
    use_beam_search: bool | None = field(
        "tokenizer", "Search for the `n` most probable outputs instead of sampling. Not with `stream`.", False
    )
    length_penalty: Annotated[float, Field(ge=LENGTH_PENALTY.minimum, le=LENGTH_PENALTY.maximum)] | None = field(
        "tokenizer",
        "In beam search, an output's log probability is divided by its length to this power.",
        1,
    )
    early_stopping: bool | None = field("tokenizer", "In beam search, end as soon as `n` outputs have ended.", False)
    stream: bool | None = field("gateway", "Send events as the output grows.", False)
    stream_options: StreamOptions | None = field("gateway", "Only with `stream`.")
    logit_bias: LogitBias | None = field(
        "executor", "Token ids in decimal -> -100 to 100, added to their logits. " + EAGER
    )
    stop: StopString | StopStrings | None = field(
        "tokenizer", "Strings that end the output; they are not part of it.", union_mode="left_to_right"
    )
    stop_token_ids: list[TokenId] | None = field(
        "scheduler", "Tokens that end the output; their text is not part of it."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = field(
        "executor",
        "Only these tokens are sampled. Include the end tokens, or the output ends at `max_tokens`. " + EAGER,
    )
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = field(
        "tokenizer",
        f"Words that must not occur in the output, at most {MAX_BAD_WORDS}. Texts of a `choice` that "
        "have one of them are left out. " + EAGER,
    )
    include_stop_str_in_output: bool | None = field("tokenizer", "Keep the stop string in the output.", False)
    skip_special_tokens: bool | None = field("tokenizer", "Leave special tokens out of the text.", True)
    spaces_between_special_tokens: bool | None = field(
        "tokenizer", "Ignored: special tokens are written without spaces between them."
    )
    return_tokens_as_token_ids: bool | None = field(
        "gateway", "Log probabilities name tokens as `token_id:123`, which is unambiguous.", False
    )
    return_token_ids: bool | None = field("gateway", "Add `prompt_token_ids` and `token_ids` to the answer.", False)
    # The form of the output; at most one of these is given.
    response_format: ResponseFormat | None = field(
        "executor", "The form of the output, which sampling enforces. At most one parameter may set a form."
    )
    structured_outputs: StructuredOutputs | None = field("executor", "vLLM's way to set the form.")
    guided_json: str | Schema | None = field("executor", "vLLM's older way to set it: a JSON schema.")
    guided_regex: str | None = field("executor", "A regular expression (Rust's syntax) for the whole output.")
    guided_choice: Choices | None = field("executor", "Texts, one of which is the output.")
    guided_grammar: str | None = field("executor", "A grammar in GBNF or Lark.")
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = field(
        "executor",
        "Most tokens of reasoning, which then ends; -1: no limit. Needs a known `--reasoning-parser`. " + EAGER,
        -1,
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = field(
        "tokenizer",
        "Keep this many tokens of a longer prompt; -1: as many as the model takes. Unset: refuse a longer prompt.",
    )
    truncation_side: Literal["left", "right"] | None = field("tokenizer", "The end that is cut off.", "left")
    cache_salt: CacheSalt | None = field(
        "scheduler", "The prefix cache is shared only with requests with the same salt."
    )
    request_id: RequestId | None = field(
        "gateway", "Takes precedence over `X-Request-Id`; the end of the answer's `id`."
    )
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
            raise ApiError(400, "prompt_logprobs cannot be streamed; remove stream", param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _beams_are_whole(self) -> "GenerationParameters":
        if self.use_beam_search and self.stream:
            message = (
                "beam search cannot stream, as its outputs are known only at the end; remove use_beam_search or stream"
            )
            raise ApiError(400, message, param="use_beam_search")
        if not self.use_beam_search and self.length_penalty not in (None, 1):
            raise ApiError(400, "length_penalty needs use_beam_search: true", param="length_penalty")
        if not self.use_beam_search and self.early_stopping:
            raise ApiError(400, "early_stopping needs use_beam_search: true", param="early_stopping")
        return self
