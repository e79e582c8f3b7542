"""The error of everything that reads models."""

from pagewire.errors import StartupError


class ModelLoadError(StartupError):
    """A model cannot be loaded as asked; the message names the file, key or tensor and the remedy."""


def wrong_value(key: str, expected: str, found: object) -> ModelLoadError:
    """Returns the error for a key of config.json with a value that no model has."""
    return ModelLoadError(
        f"config key {key}: expected {expected}, found {found!r:.100}; correct config.json, or put another value over "
        "it with --hf-overrides"
    )
