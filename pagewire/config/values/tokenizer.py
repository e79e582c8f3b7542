"""The values of flags of the tokenizer that a configuration alone does not check."""

import re

from pagewire.config import json_object
from pagewire.errors import StartupError

_FLAG = "--structured-outputs-config"
# Keys of vLLM's that change nothing: one engine serves all forms, so it has no backends to choose from or to fall back
# on, and objects have no properties besides those of their schema anyway.
_IGNORED = ("backend", "disable_fallback", "disable_additional_properties")
_BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
_REFUSED = {
    "enable_in_reasoning": "a form begins after the reasoning",
    "reasoning_parser_plugin": "code from outside is not loaded",
    "reasoning_parser": "name the parser with --reasoning-parser",
}
_WHITESPACE = "disable_any_whitespace"
_DEFAULT_IMAGES = 16
_OTHER_MEDIA = ("video", "audio")


def disables_whitespace(text: str | None) -> bool:
    """Reads the value of --structured-outputs-config: whether JSON has no whitespace by default. Raises
    StartupError."""
    content = json_object.loads(text) if text else {}
    if unknown := sorted(content.keys() - {*_IGNORED, *_REFUSED, _WHITESPACE}):
        known = ", ".join((_WHITESPACE, *_IGNORED))
        raise StartupError(f"{_FLAG} has unknown keys: {', '.join(unknown)}; known are {known}")
    if refused := next((key for key in _REFUSED if content.get(key)), None):
        raise StartupError(f"{_FLAG}: {refused} is not supported: {_REFUSED[refused]}")
    if (backend := content.get("backend", "auto")) not in _BACKENDS:
        raise StartupError(
            f"{_FLAG}: backend {backend!r:.200} is none of vLLM's ({', '.join(_BACKENDS)}); leave it out: one engine "
            "serves all forms"
        )
    if not isinstance(value := content.get(_WHITESPACE, False), bool):
        raise StartupError(f"{_FLAG}: {_WHITESPACE} is {value!r}; it must be true or false")
    return value


def served_names(text: str) -> tuple[str, ...]:
    """Reads the value of --served-model-name. Raises StartupError if it names nothing."""
    names = tuple(dict.fromkeys(name for name in re.split(r"[,\s]+", text) if name))
    if not names:
        raise StartupError("--served-model-name is empty; name the model, or leave the flag out")
    return names


def image_limit(text: str) -> int:
    """Reads the value of --limit-mm-per-prompt, `image=4` or `{"image": 4}`. Raises StartupError."""
    try:
        values = (
            json_object.loads(text)
            if text.lstrip().startswith("{")
            else dict(pair.split("=") for pair in text.split(","))
        )
        limits = {name: int(str(value)) for name, value in values.items()}
        if not limits or min(limits.values()) < 0 or limits.keys() - {"image", *_OTHER_MEDIA}:
            raise ValueError
    except (ValueError, TypeError, AttributeError) as error:
        raise StartupError(
            f'--limit-mm-per-prompt {text!r:.200}: expected a number of images; write image=4 or {{"image": 4}}'
        ) from error
    if other := [name for name in _OTHER_MEDIA if limits.get(name)]:
        raise StartupError(
            f"--limit-mm-per-prompt {text!r:.200}: prompts may have images, but no {other[0]}; leave it out, or set it "
            "to 0"
        )
    return limits.get("image", _DEFAULT_IMAGES)


def processor_options(text: str) -> dict[str, object]:
    """Reads the value of --mm-processor-kwargs. Raises StartupError."""
    try:
        options: dict[str, object] = json_object.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"--mm-processor-kwargs is not valid JSON: {error}; correct it") from error
    if not isinstance(options, dict):
        raise StartupError('--mm-processor-kwargs must be a JSON object, as {"max_pixels": 1003520}')
    return options
