"""{"name": ..., "parameters": {...}} as the whole answer, or behind <|python_tag|>; several between semicolons: Llama 3
and 4."""

from pagewire.services.tokenizer.parsers.json_calls import JsonCallReader
from pagewire.services.tokenizer.parsers.reader import MAX_SPACE, Parsed


class Llama3JsonReader(JsonCallReader):
    opening = ("<|python_tag|>",)
    marks = opening
    separator = ";"
    # An answer in JSON may well have a name.
    takes_name_alone = False

    def _start(self, parsed: Parsed) -> bool:
        rest = self._held.lstrip()
        if not rest and not self._ended and len(self._held) <= MAX_SPACE:
            return False
        self._state = self._object if rest.startswith("{") else self._text
        return True
