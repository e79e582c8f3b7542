"""Ollama's answers. Durations are in nanoseconds, times as RFC 3339 writes them."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.gateway.core.body import Body
from pagewire.gateway.schema.answers import ChatLogprob

DoneReason = Literal["stop", "length", "load", "unload", "abort", "error"]


class OllamaFunctionCall(Body, kw_only=True):
    """A called function; `arguments`: as the model wrote them, if that is an object."""

    index: int
    name: str
    arguments: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


class OllamaCall(Body, kw_only=True):
    """A call that the model makes."""

    id: str
    function: OllamaFunctionCall


class OllamaMessage(Body, kw_only=True):
    """The message of an answer, or its next part."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaChatResponse(Body, kw_only=True):
    """An answer, or a line of it. The last line has the counts: `load_duration` is the time in the queue."""

    model: str
    created_at: str
    message: OllamaMessage
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaGenerateResponse(Body, kw_only=True):
    """An answer to a prompt, or a line of it. `context`: the tokens of prompt and output, for the next request."""

    model: str
    created_at: str
    response: str
    thinking: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: DoneReason | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaEmbedResponse(Body, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class OllamaEmbeddingsResponse(Body):
    embedding: list[float]


class OllamaDetails(Body, kw_only=True):
    """A model as its files describe it; texts are empty if they do not."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Body, kw_only=True):
    """A served model. `size`: bytes of its files. `digest`: of its weights; it begins as `system_fingerprint` does."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(Body):
    models: list[OllamaModel]


class OllamaProcess(Body, kw_only=True):
    """A loaded model."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    context_length: int


class OllamaProcesses(Body):
    models: list[OllamaProcess]


class OllamaShown(Body, kw_only=True):
    """A model. `template` is empty without `--enable-tokenizer-info-endpoint`."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "tools", "vision", "thinking", "insert", "embedding"]]
    modified_at: str


class OllamaProgress(Body, kw_only=True):
    """A line of a download; the last one has `success`."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
