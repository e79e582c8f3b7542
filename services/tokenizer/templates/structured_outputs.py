"""The operator's defaults for the form of outputs: --structured-outputs-config."""

from pagewire.config import json_object
from pagewire.errors import StartupError
from pagewire.v1.common_pb2 import Grammar, SamplingParams

_FLAG = "--structured-outputs-config"
# Keys of vLLM's. One engine serves all forms, so it has no backends to choose from or to fall back on.
_BACKENDS = ("backend", "disable_fallback")
_REFUSED = {
    "disable_additional_properties": "the JSON schema of a request says which properties are allowed",
    "enable_in_reasoning": "a form begins after the reasoning",
    "reasoning_parser_plugin": "code from outside is not loaded",
    "reasoning_parser": "name the parser with --reasoning-parser",
}
_WHITESPACE = "disable_any_whitespace"


def read_structured_outputs(text: str | None) -> Grammar | None:
    """Returns the defaults for grammars, in one without a form; None if there are none. Raises StartupError."""
    content = json_object.loads(text) if text else {}
    if unknown := sorted(content.keys() - {*_BACKENDS, *_REFUSED, _WHITESPACE}):
        known = ", ".join((_WHITESPACE, *_BACKENDS))
        raise StartupError(f"{_FLAG} has unknown keys: {', '.join(unknown)}; known are {known}")
    if refused := next((key for key in _REFUSED if content.get(key)), None):
        raise StartupError(f"{_FLAG}: {refused} is not supported: {_REFUSED[refused]}")
    if not isinstance(value := content.get(_WHITESPACE, False), bool):
        raise StartupError(f"{_FLAG}: {_WHITESPACE} is {value!r}; it must be true or false")
    return Grammar(disable_any_whitespace=True) if value else None


def keep_defaults_of_json(params: SamplingParams) -> None:
    """Removes the defaults from parameters for which they have no meaning: those of other forms, and of none."""
    grammar = params.grammar
    if (form := grammar.WhichOneof("form")) is None:
        params.ClearField("grammar")
    elif form != "json_schema" or grammar.HasField("whitespace_pattern"):
        grammar.disable_any_whitespace = False
