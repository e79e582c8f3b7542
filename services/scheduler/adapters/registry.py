"""The adapters that requests may name, as executors report them and operators change them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pagewire.services.scheduler.values.executor_info import Adapter

# Names of unloaded adapters that are remembered.
_MAX_REMOVED = 10_000


class Registry:
    """Knows what each name stands for, and the earlier adapters that live requests still compute with.

    The executors report all that they were given, so a scheduler that starts later learns the same from them. Of one
    name, the adapter with the highest number counts; among equal ones, that of the first executor.
    """

    def __init__(self) -> None:
        self._named: dict[str, Adapter] = {}
        self._known: dict[str, Adapter] = {}  # by digest: those with a name, and earlier ones
        self._removed: dict[str, int] = {}  # name -> the highest number that it had when it was removed
        self._last_number = 0

    @property
    def listed(self) -> Sequence[Adapter]:
        """The adapters that requests may name, in the order of their names."""
        return [self._named[name] for name in sorted(self._named)]

    @property
    def known(self) -> Sequence[Adapter]:
        """All adapters that an executor must have: those with a name, and earlier ones of live requests."""
        return list(self._known.values())

    @property
    def retired(self) -> set[str]:
        """The digests of adapters that have lost their name."""
        return self._known.keys() - {adapter.digest for adapter in self._named.values()}

    @property
    def next_number(self) -> int:
        return self._last_number + 1

    def named(self, name: str) -> Adapter | None:
        return self._named.get(name)

    def of_digest(self, digest: str) -> Adapter | None:
        return self._known.get(digest)

    def note(self, reported: Iterable[Adapter]) -> bool:
        """Takes in what an executor reports. Returns whether a name stands for something else now."""
        has_changed = False
        for adapter in reported:
            self._last_number = max(self._last_number, adapter.number)
            self._known.setdefault(adapter.digest, adapter)
            current = self._named.get(adapter.name)
            is_newer = current is None or adapter.number > current.number
            if adapter.name and is_newer and not self.is_removed(adapter):
                self._named[adapter.name] = adapter
                has_changed = True
        return has_changed

    def is_removed(self, adapter: Adapter) -> bool:
        """Returns whether the name of a reported adapter was taken away since it was given."""
        return adapter.number <= self._removed.get(adapter.name, -1)

    def put(self, adapter: Adapter) -> None:
        """Lets a name stand for this adapter, which all executors have."""
        self._last_number = max(self._last_number, adapter.number)
        self._known[adapter.digest] = self._named[adapter.name] = adapter
        self._removed.pop(adapter.name, None)

    def remove(self, name: str) -> Adapter | None:
        """Takes a name away; returns what it stood for. A lost executor may still report it."""
        adapter = self._named.pop(name, None)
        if adapter is not None:
            self._removed[name] = self._last_number
            for digest, known in self._known.items():
                if known.name == name:
                    other = next((one for one in self._named.values() if one.digest == digest), None)
                    self._known[digest] = other or replace(known, name="")
            if len(self._removed) > _MAX_REMOVED:
                del self._removed[next(iter(self._removed))]
        return adapter

    def forget(self, digest: str) -> None:
        """Drops an adapter without a name, with which no live request computes."""
        self._known.pop(digest, None)
