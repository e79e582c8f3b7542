"""Errors of grammars."""

MAX_ERROR_LENGTH = 400


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says what is wrong, and where."""


class SlowGrammarError(GrammarError):
    """A grammar that took too long to compile, this time."""
