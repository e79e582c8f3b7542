"""Requests and answers of the routes for models and tokens."""

from typing import Annotated, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field

from pagewire.gateway.core.body import Body
from pagewire.gateway.schema.chat_messages import ChatPromptParameters, Messages
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.parameters import MODEL, Parameters, TokenId

# Texts of one request to /tokenize, which are encoded one after the other.
MAX_TOKENIZED = 1024


class TokenizeRequest(ChatPromptParameters):
    """A text, several texts, or a conversation: either `prompt` or `messages`."""

    model: str | None = field("tokenizer", MODEL)
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TOKENIZED)] | None = field(
        "tokenizer", "A text; or several, for which the answer has lists.", union_mode="left_to_right"
    )
    messages: Messages | None = field("tokenizer", "A conversation, which the chat template renders.")
    return_token_strs: bool | None = field("tokenizer", "Return the text of each token, too.", False)


class DetokenizeRequest(Parameters):
    model: str | None = field("tokenizer", MODEL)
    tokens: list[TokenId] | Annotated[list[list[TokenId]], Field(max_length=MAX_TOKENIZED)] = required(
        "tokenizer", "Token ids; or lists of them, for which the answer has a list.", union_mode="left_to_right"
    )
    skip_special_tokens: bool | None = field("tokenizer", "Leave special tokens out of the text.", False)


# Answers.


Capability = Literal["chat", "completions", "embeddings", "score", "rerank", "classify", "images", "tools", "reasoning"]


class Model(Body, kw_only=True):
    """A name that requests may give. A request for a model that is `asleep` or `absent` wakes or loads it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["pagewire"] = "pagewire"
    root: str  # of an adapter: its path; of an alias: the model that it stands for
    parent: str | None = None  # of an adapter: the model that it adapts
    max_model_len: int | None
    state: Literal["ready", "asleep", "loading", "absent"]
    capabilities: list[Capability]  # empty: not known before it is loaded
    size: int | None  # of its files, bytes
    progress: str | UnsetType = UNSET  # of a load, in words
    problem: str | UnsetType = UNSET  # why it could not be loaded
    default_sampling_params: dict[str, float]  # of requests that name none; those that are missing are OpenAI's
    default_sampling_source: str  # where they come from, in words; "" if they are all OpenAI's


class ModelList(Body, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(Body):
    """The tokens of a text. For several texts, each member but `max_model_len` is a list with one entry for each."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | None


class DetokenizeResponse(Body):
    """The text, by the names that vLLM's and SGLang's clients read."""

    prompt: str | list[str]
    text: str | list[str]
