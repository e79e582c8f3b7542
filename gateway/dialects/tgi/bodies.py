"""The body and the answers of TGI's routes."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import ConfigDict, Field, create_model, model_validator

from pagewire.config.sampling_params import BY_NAME, INT32_MAX
from pagewire.gateway.core.body import Body
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import Refused, wrong_member
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.parameters import Parameters, StopStrings
from pagewire.gateway.schema.sampling import sampling_fields
from pagewire.gateway.schema.structured import Schema

MAX_NEW_TOKENS = 100
_SAME_NAMES = ("temperature", "top_p", "top_k", "repetition_penalty", "frequency_penalty", "seed")

_SameParameters = create_model(
    "_SameParameters",
    __base__=Parameters,
    **{name: value for name, value in sampling_fields().items() if name in _SAME_NAMES},
)


class TgiGrammar(BoundedModel):
    """The form of the output."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["json", "regex", "json_schema"] = required("gateway", "The kind of `value`.")
    value: str | Schema = required(
        "executor", "A JSON schema, or a regular expression (Rust's syntax); with `json_schema`, `schema` of it.",
        union_mode="left_to_right",
    )  # fmt: skip


class TgiParameters(_SameParameters):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """Parameters of the output. Without `do_sample`, and without a parameter of sampling, the most probable tokens are
    taken, as TGI does."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "best_of": Refused("request the log probabilities (details), and select the best", (1,)),
        "decoder_input_details": Refused("see prompt_logprobs of /v1/completions", (False,)),
        "typical_p": Refused("see top_p and min_p", (1, 1.0)),
        "watermark": Refused("outputs have no watermark", (False,)),
    }

    max_new_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "scheduler", BY_NAME["max_tokens"].help.partition(".")[0] + ".", MAX_NEW_TOKENS
    )
    do_sample: bool | None = field("gateway", "Sample, even if no parameter of sampling is given.", False)
    stop: StopStrings | None = field("tokenizer", "Strings that end the output. They are part of it, as in TGI.")
    truncate: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "tokenizer", "Keep this many tokens of a longer prompt, its end."
    )
    grammar: TgiGrammar | None = field("executor", "The form of the output.")
    adapter_id: str | None = field("tokenizer", "The name of an adapter.")
    details: bool | None = field("gateway", "Tokens with log probabilities, and the end of the output.", False)
    top_n_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor", "With `details`: the number of most probable tokens.", 0
    )
    return_full_text: bool | None = field("gateway", "Put the prompt before the text.", False)


class TgiGenerateRequest(Parameters):
    """A prompt as TGI's clients send it."""

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    inputs: Annotated[str, Field(min_length=1)] = required("tokenizer", "A prompt.")
    parameters: TgiParameters | None = field("executor", "Parameters of the output.")
    stream: bool | None = field("gateway", "Send an event for each part of the output.", False)
    model: str | None = field("tokenizer", "A served model or an adapter; unset: the first model.")

    @model_validator(mode="after")
    def _one_model(self) -> "TgiGenerateRequest":
        if self.model and self.parameters and self.parameters.adapter_id:
            raise wrong_member("model", "give either model or parameters.adapter_id")
        return self


FinishReason = Literal["length", "eos_token", "stop_sequence", "abort"]


class TgiToken(Body, kw_only=True):
    """A token. `special`: it has no text."""

    id: int
    text: str
    logprob: float
    special: bool


class TgiDetails(Body, kw_only=True):
    """The end of an output, and its tokens."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int | UnsetType = UNSET
    prefill: list[Any] | UnsetType = UNSET
    tokens: list[TgiToken] | UnsetType = UNSET
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET


class TgiOutput(Body, kw_only=True):
    """The whole output."""

    generated_text: str
    details: TgiDetails | UnsetType = UNSET


class TgiEvent(Body, kw_only=True):
    """A token with the text that it completes. The last one has the whole text."""

    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | UnsetType = UNSET
    generated_text: str | None
    details: TgiDetails | None


class TgiError(Body):
    """An error of TGI's API. In a stream, it is the last event."""

    error: str
    error_type: str
