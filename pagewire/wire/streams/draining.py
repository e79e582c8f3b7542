"""The state of a process that is about to end, which its neighbours learn at once."""

from collections.abc import Callable


class Draining:
    """The draining of this process: running requests continue, and neighbours send new ones elsewhere, if they can."""

    def __init__(self) -> None:
        self.has_begun = False
        self.on_begin: set[Callable[[], None]] = set()

    def begin(self) -> None:
        self.has_begun = True
        for notify in list(self.on_begin):
            notify()
