"""The error that every reader of models raises."""

from pagewire.errors import StartupError


class ModelLoadError(StartupError):
    """A model cannot be loaded as asked; the message names the file, key or tensor and the remedy."""


def wrong_value(key: str, expected: str, found: object) -> ModelLoadError:
    """Returns the error for an invalid value of a key of config.json."""
    return ModelLoadError(
        f"config key {key}: expected {expected}, found {found!r:.100}; correct config.json, or put another value over "
        "it with --hf-overrides"
    )
