"""The names of adapters: which are possible, and which were looked for in vain."""

import re
import time
from collections import OrderedDict
from collections.abc import Callable

import grpc

from pagewire.wire.rpc import RpcError

# As of models: `org/name`. Executors look for them in a directory, so that no part may be "..".
_NAME = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[A-Za-z0-9][A-Za-z0-9._:+@/-]{0,254}")
# Seconds in which a name that was not found is not looked for again, and the most names that are remembered.
_MISSING_S = 5.0
_MAX_MISSING = 10_000


def is_name(name: str) -> bool:
    """Returns whether an adapter can have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raises RpcError (INVALID_ARGUMENT) for a name that no adapter can have."""
    if not is_name(name):
        what = "name: use up to 255 letters, digits and ._:+@/-, with a letter or digit first and no parts . or .."
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("name", what)])


class Missing:
    """The names that were not found lately, so that looking for them again costs nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = OrderedDict[str, float]()

    def __contains__(self, name: str) -> bool:
        return self._until.get(name, 0.0) > self._clock()

    def add(self, name: str) -> None:
        self._until[name] = self._clock() + _MISSING_S
        self._until.move_to_end(name)
        while len(self._until) > _MAX_MISSING:
            self._until.popitem(last=False)

    def discard(self, name: str) -> None:
        self._until.pop(name, None)
