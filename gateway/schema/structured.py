"""What clients say about the form of an output: OpenAI's response_format, vLLM's structured_outputs and guided_*."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# A JSON schema; its content is the executor's to understand.
Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]
_STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class TextFormat(BaseModel):
    model_config = _STRICT

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    model_config = _STRICT

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """Whether strict or not, the output is what the schema describes."""

    model_config = _STRICT

    name: str
    description: str | None = None
    content: Schema = Field(True, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(BaseModel):
    model_config = _STRICT

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Structure(BaseModel):
    model_config = _STRICT

    begin: str
    content: Schema = Field(alias="schema")
    end: str


class StructuralTagFormat(BaseModel):
    """`format`, in xgrammar's language; or, as before it, text in which a trigger begins one of the structures."""

    model_config = _STRICT

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: Annotated[list[Structure], Field(min_length=1)] | None = None
    triggers: Choices | None = None

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "StructuralTagFormat":
        if (self.format is None) == (self.structures is None) or (self.structures is None) != (self.triggers is None):
            raise ValueError("give either format, or structures and triggers")
        return self


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(BaseModel):
    """One of the forms, and with json or json_object what is said about whitespace."""

    model_config = _STRICT

    schema_: str | Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
