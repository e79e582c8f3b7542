"""What clients send for vectors and scores: OpenAI's, vLLM's, Cohere's and Jina's bodies."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pagewire.gateway.errors import ApiError
from pagewire.gateway.schema.requests import CacheSalt, ChatPromptParameters, Messages, Parameters, Prompts, RequestId
from pagewire.sampling_params import INT32_MAX

# As `unsupported.UNSUPPORTED`, of bodies for vectors.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "input_type": (),
    "instruction": (),
    "max_chunks_per_doc": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "normalize": (True,),
    "padding": ("do_not_pad",),
    "priority": (0,),
    "rank_fields": (["text"],),
    "truncation_side": ("right",),
    "use_activation": (True,),
}

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]


class VectorParameters(Parameters):
    """What all bodies for vectors and scores share."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None
    # -1: to what the model takes.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    # A label that changes nothing about the answer.
    user: str | None = None


class InputParameters(VectorParameters, ChatPromptParameters):
    """Either input or messages, which are one input."""

    input: Prompts | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "InputParameters":
        if (self.input is None) == (self.messages is None):
            raise ApiError(400, "give either input or messages", param="input")
        return self


class EmbeddingRequest(InputParameters):
    encoding_format: Literal["float", "base64"] | None = None
    # First numbers of each vector that are wanted.
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    # One of the model's prompts (sentence-transformers), put before each text.
    prompt_name: str | None = None


class ClassificationRequest(InputParameters):
    pass


class PoolingRequest(EmbeddingRequest):
    # By default what the model is served for.
    task: Literal["embed", "classify"] | None = None


class TextDocument(BaseModel):
    """A text as an object."""

    model_config = ConfigDict(strict=True, extra="forbid")

    text: str


Text = str | TextDocument
Texts = Annotated[
    str | TextDocument | Annotated[list[Text], Field(min_length=1)],
    Field(union_mode="left_to_right"),
]
# Names of a score's sides: vLLM's, of which a body has one pair.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class PairParameters(VectorParameters):
    """Of each pair's texts, longer ones are cut to so many tokens; 0: they are not."""

    max_tokens_per_query: Count | None = None
    max_tokens_per_doc: Count | None = None


class ScoreRequest(PairParameters):
    """text_1 and text_2, or queries and documents, queries and items, data_1 and data_2. One first text is scored with
    each second one, several with theirs."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @model_validator(mode="after")
    def _two_sides(self) -> "ScoreRequest":
        self.sides()
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        """The first texts, and as many second ones. Raises ApiError 400."""
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
    query: Text
    documents: Annotated[list[Text], Field(min_length=1)]
    # How many of the best are wanted; 0: all.
    top_n: Count | None = None
    # Whether they come with their texts. Default true.
    return_documents: bool | None = None


def texts_of(texts: Text | Sequence[Text]) -> list[str]:
    if isinstance(texts, str | TextDocument):
        return [text_of(texts)]
    return [text_of(text) for text in texts]


def text_of(text: Text) -> str:
    return text if isinstance(text, str) else text.text
