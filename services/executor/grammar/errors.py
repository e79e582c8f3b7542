"""Errors of grammars."""

MAX_ERROR_LENGTH = 400


class GrammarError(ValueError):
    """A grammar that cannot be used; the message names the error and its place."""


class SlowGrammarError(GrammarError):
    """A grammar that took too long to compile; another attempt may succeed."""
