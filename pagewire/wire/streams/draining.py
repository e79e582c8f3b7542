"""Whether this process is to end, of which neighbours are told at once."""

from collections.abc import Callable


class Draining:
    """Who has requests here goes on until they end; whoever has somebody else to go to brings nothing new."""

    def __init__(self) -> None:
        self.has_begun = False
        self.on_begin: set[Callable[[], None]] = set()

    def begin(self) -> None:
        self.has_begun = True
        for tell in list(self.on_begin):
            tell()
