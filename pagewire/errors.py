"""Errors meant for the person who started Pagewire."""


class StartupError(RuntimeError):
    """What keeps Pagewire from starting lies outside the program: no such model, a port in use, too little memory.

    The message names cause and remedy; the command line prints it without a traceback and ends with exit code 1.
    """


class ModelNotFoundError(StartupError):
    """MODEL names nothing that can be found; the message says what was tried."""
