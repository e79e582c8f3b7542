"""The version of Pagewire."""

__version__ = "0.1.0"
