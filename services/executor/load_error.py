"""The error of everything that reads models."""

from pagewire.errors import StartupError


class ModelLoadError(StartupError):
    """A model cannot be loaded as asked; the message names the file, key or tensor and the remedy."""
