"""What is wrong with a grammar."""

MAX_ERROR_LENGTH = 400


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says what is wrong, and where."""


class SlowGrammarError(GrammarError):
    """One that takes too long to compile, at this time."""
