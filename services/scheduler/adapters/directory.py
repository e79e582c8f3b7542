"""The adapters that lie in `--lora-dir`, as each executor sees it. Pure."""

from collections.abc import Collection, Iterator, Sequence

from pagewire.services.scheduler.values.executor_info import Adapter, FoundAdapter

_Look = tuple[str, dict[str, FoundAdapter]]  # the directory, and what lies there by name


class Directory:
    """Remembers the latest look of each executor. One that is lost is expected back, with the same directory."""

    def __init__(self) -> None:
        self._looks: dict[int, _Look] = {}  # by replica
        # Names that were taken away and not found since -> Unix time of that, ns.
        self._hidden: dict[str, int] = {}

    def note(self, replica_id: int, directory: str, found: Sequence[FoundAdapter], replicas: Collection[int]) -> bool:
        """Takes in what an executor sees. replicas: all that there are. Returns whether `listed` has changed."""
        before = self.listed
        self._looks = {one: look for one, look in self._looks.items() if one in replicas}
        self._looks[replica_id] = directory, {one.name: one for one in found}
        for one in found:
            self._hidden.pop(one.name, None)
        return self.listed != before

    @property
    def is_watched(self) -> bool:
        return any(directory for directory, _ in self._looks.values())

    @property
    def listed(self) -> Sequence[Adapter]:
        """The adapters that may be loaded, without contents, and those that cannot be served, in the order of their
        names."""
        names = {name for _, by_name in self._looks.values() for name in by_name}
        first = [self.of(name)[0] for name in sorted(names)]
        return [Adapter(one.name, one.path, problem=one.problem) for one in first]

    def of(self, name: str) -> list[FoundAdapter]:
        """Returns what executors see under a name; an executor with a problem comes last."""
        found = [by_name[name] for _, by_name in self._looks.values() if name in by_name]
        return sorted(found, key=lambda one: bool(one.problem))

    def has_lost(self, adapter: Adapter) -> bool:
        """Returns whether an adapter lay in the directory, and is no longer there."""
        directory, _, name = adapter.path.rpartition("/")
        watched = {one.rstrip("/") for one, _ in self._looks.values() if one}
        return directory in watched and name == adapter.name and not self.of(name)

    def changed(self, adapters: Sequence[Adapter]) -> Iterator[Adapter]:
        """Yields those of these adapters that have other contents in the directory now, as far as is known."""
        for adapter in adapters:
            found = [one for one in self.of(adapter.name) if one.path == adapter.path and not one.problem]
            if any(one.digest != adapter.digest for one in found):
                yield adapter

    # -- names that were taken away ----------------------------------------------------------------------------------

    def hide(self, name: str, now: int) -> None:
        """Takes in that a name is taken away, from executors too: it is found again once its files have changed. now:
        Unix time, ns."""
        self._hidden[name] = now
        for _, by_name in self._looks.values():
            by_name.pop(name, None)

    def show(self, name: str) -> None:
        self._hidden.pop(name, None)

    def take_hidden(self, found: Sequence[FoundAdapter]) -> tuple[list[str], list[FoundAdapter]]:
        """Returns the names of these that were taken away since their files changed, as an executor that starts does
        not know, and the rest."""
        hidden = [one.name for one in found if one.changed_at <= self._hidden.get(one.name, -1)]
        return hidden, [one for one in found if one.name not in hidden]
