"""The form of an output: OpenAI's response_format, vLLM's structured_outputs and guided_*."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.schema.field import field, required

# A JSON schema, which the executor checks.
Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(min_length=1, fail_fast=True)]
_STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class TextFormat(BoundedModel):
    model_config = _STRICT

    type: Literal["text"]


class JsonObjectFormat(BoundedModel):
    model_config = _STRICT

    type: Literal["json_object"]
    content: Schema | None = field(
        "executor", "A JSON schema, as instructor sends it here. Unset: any object.", alias="schema"
    )


class NamedSchema(BoundedModel):
    """A schema that the output follows, strict or not."""

    model_config = _STRICT

    name: str = required("gateway", "Not shown to the model.")
    description: str | None = field("gateway", "Not shown to the model.")
    content: Schema = Field(True, alias="schema", description="A JSON schema. Unset: any JSON.")
    strict: bool | None = field(
        "executor",
        "The output always follows the schema; if true, objects are closed, as by `disable_additional_properties`.",
        False,
    )


class JsonSchemaFormat(BoundedModel):
    model_config = _STRICT

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Structure(BoundedModel):
    model_config = _STRICT

    begin: str = required("executor", "The text before the JSON; begins with a trigger.")
    content: Schema = required("executor", "A JSON schema.", alias="schema")
    end: str = required("executor", "The text after the JSON.")


class StructuralTagFormat(BoundedModel):
    """A `format` in xgrammar's language; or `structures` and `triggers`, the older form."""

    model_config = _STRICT

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = field(
        "executor", "A structural tag in xgrammar's language; excludes the other two."
    )
    structures: Annotated[list[Structure], Field(min_length=1)] | None = field(
        "executor", "The structures that may follow a trigger."
    )
    triggers: Choices | None = field("executor", "Texts that only a structure may follow.")

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "StructuralTagFormat":
        if (self.format is None) == (self.structures is None) or (self.structures is None) != (self.triggers is None):
            raise ValueError("give either format, or structures and triggers")
        return self


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(BoundedModel):
    """One form; for json and json_object also the whitespace."""

    model_config = _STRICT

    schema_: str | Schema | None = field("executor", "A JSON schema, as JSON or as text.", alias="json")
    regex: str | None = field("executor", "A regular expression (Rust's syntax) for the whole output.")
    choice: Choices | None = field("executor", "Texts, one of which is the output.")
    grammar: str | None = field("executor", "A grammar in GBNF or Lark.")
    structural_tag: str | None = field("executor", "JSON, as text, of a `response_format` of this type.")
    json_object: bool | None = field("executor", "Any JSON object.", False)
    whitespace_pattern: str | None = field("executor", "A regular expression for whitespace in JSON.")
    disable_any_whitespace: bool | None = field("executor", "No whitespace in JSON.", False)
    disable_additional_properties: bool | None = field(
        "executor",
        "Objects have no properties besides those in `properties`, unless the schema has `additionalProperties`. "
        "Unset: they have none, unless the executor has `--allow-additional-properties`.",
    )
