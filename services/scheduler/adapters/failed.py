"""The names that could not be loaded lately."""

import time
from collections import OrderedDict
from collections.abc import Callable

from pagewire.wire.rpc import RpcError

# Seconds in which a name that could not be loaded is not tried again, and the most names that are remembered.
_FAILED_S = 5.0
_MAX_FAILED = 10_000


class Failed:
    """Remembers why a name could not be loaded, so that requests with it cost nothing for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed = OrderedDict[str, tuple[float, RpcError]]()

    def error(self, name: str) -> RpcError | None:
        """Returns the error of the last attempt, if that was lately."""
        until, error = self._failed.get(name, (0.0, None))
        return error if until > self._clock() else None

    def add(self, name: str, error: RpcError) -> None:
        self._failed[name] = self._clock() + _FAILED_S, error
        self._failed.move_to_end(name)
        while len(self._failed) > _MAX_FAILED:
            self._failed.popitem(last=False)

    def discard(self, name: str) -> None:
        self._failed.pop(name, None)
