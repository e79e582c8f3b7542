"""Llama 3 and 4: {"name": ..., "parameters": {...}} as the whole answer, or after <|python_tag|>; several
between semicolons."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.json_calls import JsonCallReader
from pagewire.services.tokenizer.parsers.shared.formats import (
    CallableTool,
    Format,
    amid_text,
    json_of,
    listed,
    one_of,
    regex_of,
    sequence,
    tag,
    text_of,
)
from pagewire.services.tokenizer.parsers.shared.keywords import definitions_of
from pagewire.services.tokenizer.parsers.shared.reader import MAX_SPACE


class Llama3JsonReader(JsonCallReader):
    opening = ("<|python_tag|>",)
    marks = opening
    separator = ";"
    # An answer in JSON may have a name, too.
    takes_name_alone = False

    @classmethod
    def output_format(
        cls,
        tools: Sequence[CallableTool],
        *,
        only_one: bool,
        answer: Format | None = None,
        excludes: Sequence[str] = (),
    ) -> Format:
        """Returns the format. A brace at the beginning opens a call; without `answer`, nothing else has one."""
        options = _options(answer)
        whole = listed((tag("", _as_object(tool, options), "") for tool in tools), "; ", only_one=only_one)
        marked = tag("<|python_tag|>", whole, "")
        if answer is not None:
            return one_of(whole, marked, answer)
        text = amid_text(cls.opening, [marked], only_one=only_one, excludes=excludes)
        return one_of(whole, marked, sequence(regex_of(rf"\s{{0,{MAX_SPACE}}}([^\s{{<]|<[^|])"), text), text_of(""))

    def _start(self, parsed: Parsed) -> bool:
        rest = self._held.lstrip()
        if not rest and not self._ended and len(self._held) <= MAX_SPACE:
            return False
        self._state = self._object if rest.startswith("{") else self._text
        return True


def _as_object(tool: CallableTool, options: Mapping[str, Any]) -> Format:
    """Returns the format of a whole call: one schema, with the whitespace of an answer that begins with a brace, as the
    grammar follows both until they differ."""
    definitions = definitions_of(tool)
    parameters = {key: value for key, value in tool.schema.items() if key not in definitions}
    return json_of(
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
            **options,
            **definitions,
        }
    )


def _options(answer: Format | None) -> Mapping[str, Any]:
    schema = None if answer is None else answer.get("json_schema")
    return {} if not isinstance(schema, dict) else {"x-guidance": schema.get("x-guidance", {})}
