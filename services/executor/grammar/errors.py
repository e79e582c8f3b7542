"""Errors of grammars."""

MAX_ERROR_LENGTH = 400


class GrammarError(ValueError):
    """A grammar that cannot be used; the message names the error and its place."""


class PassingGrammarError(GrammarError):
    """A grammar that took too much time or memory; another attempt may succeed."""


class NoTrialError(GrammarError):
    """The process that tries grammars does not start, whatever the grammar."""
