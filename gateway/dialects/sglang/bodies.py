"""The body and the answer of /generate."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, create_model, model_validator

from pagewire.config.sampling_params import INT32_MAX, INT64_MAX, MAX_CHOICES
from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.schema.field import RequestId, field
from pagewire.gateway.schema.parameters import (
    CacheSalt,
    LogitBias,
    Parameters,
    StopString,
    StopStrings,
    TokenId,
    TokenIdList,
)
from pagewire.gateway.schema.sampling import sampling_fields
from pagewire.gateway.schema.structured import Schema
from pagewire.gateway.schema.unsupported import UNSUPPORTED

MAX_NEW_TOKENS = 128

_IMAGES = "send images in a chat; see /v1/chat/completions"
# Parameters of the table with another name or place in SGLang's body; all others have the same name in both APIs.
_NAMED_OTHERWISE = frozenset({"max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs", "priority"})

_SameSampling = create_model(
    "_SameSampling",
    __base__=Parameters,
    **{name: value for name, value in sampling_fields().items() if name not in _NAMED_OTHERWISE},
)


class NativeSamplingParams(_SameSampling):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """Parameters of sampling, and of the end of the output."""

    max_new_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "scheduler", "Most tokens of the output.", MAX_NEW_TOKENS
    )
    min_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor",
        "Until the output has this many tokens, end tokens are not sampled and stop strings do not count.",
        0,
    )
    sampling_seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = field(
        "executor", "The same seed draws the same random numbers, as `seed` of the other APIs."
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = field("gateway", "Outputs for each prompt.", 1)
    stop: StopString | StopStrings | None = field(
        "tokenizer", "Strings that end the output; they are not part of it.", union_mode="left_to_right"
    )
    stop_token_ids: list[TokenId] | None = field("scheduler", "Tokens that end the output.")
    no_stop_trim: bool | None = field("tokenizer", "Keep the stop string in the output.", False)
    skip_special_tokens: bool | None = field("tokenizer", "Leave special tokens out of the text.", True)
    spaces_between_special_tokens: bool | None = field("tokenizer", "Ignored.")
    logit_bias: LogitBias | None = field("executor", "Token ids in decimal -> -100 to 100.")
    # At most one of these.
    json_schema: str | Schema | None = field("executor", "The form of the output: a JSON schema.")
    regex: str | None = field("executor", "A regular expression (Rust's syntax) for the whole output.")
    ebnf: str | None = field("executor", "A grammar in GBNF or Lark.")
    structural_tag: str | None = field("executor", "A structural tag, as JSON text.")


class NativeGenerateRequest(Parameters):
    """One prompt, or several with the same sampling parameters, as either `text` or `input_ids`."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        **UNSUPPORTED,
        "audio_data": Refused("no served model reads audio"),
        "image_data": Refused(_IMAGES),
        "input_embeds": Refused("send prompts as text or token ids"),
        "logprob_start_len": Refused("see prompt_logprobs of /v1/completions", (-1,)),
        "token_ids_logprob": Refused("request more alternatives (top_logprobs_num)", ([],)),
        "video_data": Refused(_IMAGES),
    }

    text: str | Annotated[list[str], Field(min_length=1)] | None = field(
        "tokenizer", "Prompts.", union_mode="left_to_right"
    )
    input_ids: TokenIdList | Annotated[list[TokenIdList], Field(min_length=1)] | None = field(
        "tokenizer", "Prompts, as token ids.", union_mode="left_to_right"
    )
    sampling_params: NativeSamplingParams | None = field("executor", "Sampling parameters of all prompts.")
    stream: bool | None = field("gateway", "Send events as the output grows, each with the whole text so far.", False)
    rid: RequestId | None = field("gateway", "An id for /abort_request.")
    return_logprob: bool | None = field("executor", "Log probabilities of the output's tokens.", False)
    top_logprobs_num: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor", "With `return_logprob`: the number of most probable tokens.", 0
    )
    return_text_in_logprobs: bool | None = field("tokenizer", "With `return_logprob`: the tokens' texts.", False)
    cache_salt: CacheSalt | None = field(
        "scheduler", "The prefix cache is shared only with requests with the same salt."
    )
    priority: Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)] | None = field(
        "scheduler",
        "With `--scheduling-policy priority`: requests with a lower value run first. Otherwise, only 0 is accepted.",
        0,
    )
    lora_path: str | None = field("tokenizer", "The name of an adapter.")
    log_metrics: bool | None = field("gateway", "Ignored: metrics count all requests.", True)

    @model_validator(mode="after")
    def _has_one_prompt(self) -> "NativeGenerateRequest":
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "give either text or input_ids", param="text")
        return self

    @property
    def is_single(self) -> bool:
        """True if the answer is one output, not a list."""
        prompts: Any = self.input_ids if self.text is None else self.text
        params = self.sampling_params
        return (isinstance(prompts, str) or isinstance(prompts[0], int)) and (params is None or params.n in (None, 1))


NativeLogprob = tuple[float, int, str | None]
"""Log probability, token id, and the token's text or None."""


class NativeFinish(Body, kw_only=True):
    """The end of an output. `matched`: the stop string or token; `length`: the number of tokens."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | UnsetType | None = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class NativeMeta(Body, kw_only=True):
    """Data about an output. `e2e_latency`: seconds since the request arrived."""

    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str  # of the weights that make it
    e2e_latency: float
    output_token_logprobs: list[NativeLogprob] | UnsetType = UNSET
    output_top_logprobs: list[list[NativeLogprob]] | UnsetType = UNSET


class NativeOutput(Body, kw_only=True):
    """An output, or its beginning. `index`: its place among several."""

    text: str
    output_ids: list[int]
    meta_info: NativeMeta
    index: int | UnsetType = UNSET
