"""The error of everything that reads models."""

from pagewire.errors import StartupError


class ModelLoadError(StartupError):
    """A model cannot be loaded as asked; the message names the file, key or tensor and the remedy."""


def wrong_value(key: str, expected: str, found: object) -> ModelLoadError:
    """Of a key of config.json that has a value which no model has."""
    return ModelLoadError(
        f"config key {key}: expected {expected}, found {found!r:.100}; correct config.json, or put another value over "
        "it with --hf-overrides"
    )
