"""The values of flags about images in prompts."""

from pagewire.config import json_object
from pagewire.errors import StartupError

_DEFAULT_LIMIT = 16
_OTHER_MEDIA = ("video", "audio")


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
    return limits.get("image", _DEFAULT_LIMIT)


def processor_options(text: str) -> dict[str, object]:
    """Reads the value of --mm-processor-kwargs. Raises StartupError."""
    try:
        options: dict[str, object] = json_object.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"--mm-processor-kwargs is not valid JSON: {error}; correct it") from error
    if not isinstance(options, dict):
        raise StartupError('--mm-processor-kwargs must be a JSON object, as {"max_pixels": 1003520}')
    return options
