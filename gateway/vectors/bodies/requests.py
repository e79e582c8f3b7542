"""The requests for vectors and scores: OpenAI's, vLLM's and Jina's bodies."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.schema.chat_messages import ChatPromptParameters, Messages
from pagewire.gateway.schema.field import RequestId, field, required
from pagewire.gateway.schema.parameters import LABEL, MODEL, CacheSalt, Parameters, Prompts

_IMAGES = "images cannot be embedded"
# Like `unsupported.UNSUPPORTED`, for vectors.
UNSUPPORTED: Mapping[str, Refused] = {
    "chat_template": Refused("requests cannot carry a template"),
    "embed_dtype": Refused("numbers are always float32", ("float32",)),
    "endianness": Refused("base64 encodes little-endian numbers", ("little", "native")),
    "input_type": Refused("the model's prompts have names; see prompt_name"),
    "instruction": Refused("put the instruction before the text, as in the model's training"),
    "max_chunks_per_doc": Refused("documents are not split; see max_tokens_per_doc"),
    "media_io_kwargs": Refused(_IMAGES),
    "mm_processor_kwargs": Refused(_IMAGES),
    "normalize": Refused("the model's files set it", (True,)),
    "padding": Refused("texts are not padded", ("do_not_pad",)),
    "priority": Refused("texts are computed in the order of arrival", (0,)),
    "rank_fields": Refused("documents are plain texts", (["text"],)),
    "use_activation": Refused("the model's files set it", (True,)),
}

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]


class VectorParameters(Parameters):
    """The parameters of all requests for vectors and scores."""

    unsupported: ClassVar[Mapping[str, Refused]] = UNSUPPORTED

    model: str | None = field("tokenizer", MODEL)
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = field(
        "tokenizer",
        "Keep this many tokens of a longer text; -1: as many as the model takes. Unset: refuse a longer text.",
    )
    truncate: bool | Literal["NONE", "START", "END"] | None = field(
        "tokenizer",
        "TEI's, Ollama's and Cohere's name: cut a longer text to what the model takes, at its end or start.",
        False,
        union_mode="left_to_right",
    )
    truncation_side: Literal["left", "right"] | None = field(
        "tokenizer", "The end that `truncate_prompt_tokens` cuts off.", "right"
    )
    add_special_tokens: bool | None = field(
        "tokenizer", "Add special tokens such as `[CLS]` or BOS; by default not to `messages`.", True
    )
    cache_salt: CacheSalt | None = field(
        "scheduler", "The prefix cache is shared only with requests with the same salt."
    )
    request_id: RequestId | None = field("gateway", "Takes precedence over `X-Request-Id`.")
    user: str | None = field("gateway", LABEL)

    @model_validator(mode="after")
    def _one_name_of_truncation(self) -> "VectorParameters":
        if self.truncate is None:
            return self
        if self.truncate_prompt_tokens is not None:
            raise ApiError(400, "give either truncate or truncate_prompt_tokens", param="truncate")
        if self.truncate == "START":
            if self.truncation_side == "right":
                raise ApiError(400, "truncate is START and truncation_side right: give one of them", param="truncate")
            self.truncation_side = "left"
        self.truncate_prompt_tokens = None if self.truncate in (False, "NONE") else -1
        return self


class InputParameters(VectorParameters, ChatPromptParameters):
    """One input or several: either `input`, or `messages`, which are one input."""

    input: Prompts | None = field("tokenizer", "One or several, each as text or token ids.")
    messages: Messages | None = field("tokenizer", "A conversation, which is one input.")

    @model_validator(mode="after")
    def _one_of_both(self) -> "InputParameters":
        if (self.input is None) == (self.messages is None):
            raise ApiError(400, "give either input or messages", param="input")
        return self


class EmbeddingRequest(InputParameters):
    encoding_format: Literal["float", "base64"] | None = field(
        "gateway", "base64 of little-endian float32 saves three quarters of the bytes.", "float"
    )
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "executor", "Return only the first numbers of each vector; for models trained for it."
    )
    prompt_name: str | None = field(
        "tokenizer", "One of the model's prompts (sentence-transformers), put before each text."
    )


class ClassificationRequest(InputParameters):
    pass


class PoolingRequest(EmbeddingRequest):
    task: Literal["embed", "classify"] | None = field("gateway", "Unset: the task of the served model.")


class TextDocument(BoundedModel):
    """A text as an object."""

    model_config = ConfigDict(strict=True, extra="forbid")

    text: str


Text = str | TextDocument
Texts = Annotated[
    str | TextDocument | Annotated[list[Text], Field(min_length=1)],
    Field(union_mode="left_to_right"),
]
FIRST = "The first texts: one, or as many as the second ones."
SECOND = "The second texts."
# vLLM's names of the two sides of a score; a body has one pair.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class PairParameters(VectorParameters):
    """Limits for the texts of each pair: longer ones are cut; 0: no limit."""

    max_tokens_per_query: Count | None = field(
        "tokenizer", "Most tokens of the first text of each pair; 0: no limit.", 0
    )
    max_tokens_per_doc: Count | None = field(
        "tokenizer", "Most tokens of the second text of each pair; 0: no limit.", 0
    )


class ScoreRequest(PairParameters):
    """Pairs of texts: text_1 and text_2, queries and documents, queries and items, or data_1 and data_2. One first text
    is scored with each second one; several are scored with the second one at the same place."""

    text_1: Texts | None = field("tokenizer", FIRST)
    text_2: Texts | None = field("tokenizer", SECOND)
    queries: Texts | None = field("tokenizer", FIRST)
    documents: Texts | None = field("tokenizer", SECOND)
    items: Texts | None = field("tokenizer", SECOND)
    data_1: Texts | None = field("tokenizer", FIRST)
    data_2: Texts | None = field("tokenizer", SECOND)

    @model_validator(mode="after")
    def _two_sides(self) -> "ScoreRequest":
        self.sides()
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        """Returns the first texts, and as many second ones. Raises ApiError 400."""
        given = {name for names in SIDES for name in names if getattr(self, name) is not None}
        names = next((names for names in SIDES if given == set(names)), None)
        if names is None:
            choices = ", or ".join(" and ".join(names) for names in SIDES)
            raise ApiError(400, f"give {choices}", param="text_1")
        first, second = (texts_of(getattr(self, name)) for name in names)
        if len(first) not in (1, len(second)):
            message = f"{names[0]} has {len(first)} entries and {names[1]} {len(second)}: give one, or as many"
            raise ApiError(400, message, param=names[0])
        return first * (len(second) // len(first)), second


class RerankRequest(PairParameters):
    query: Text = required("tokenizer", "A text.")
    documents: Annotated[list[Text], Field(min_length=1)] = required(
        "tokenizer", "Texts, each of which is scored with the query."
    )
    top_n: Count | None = field("gateway", "Return this many of the best; 0: all.", 0)
    return_documents: bool | None = field("gateway", "Return the texts, too.", True)


def texts_of(texts: Text | Sequence[Text]) -> list[str]:
    if isinstance(texts, str | TextDocument):
        return [text_of(texts)]
    return [text_of(text) for text in texts]


def text_of(text: Text) -> str:
    return text if isinstance(text, str) else text.text
