"""The adapters that lie in `--lora-dir`: found by looking, and told apart by the times and sizes of their files."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pagewire.config.values.adapter_names import is_adapter_name
from pagewire.services.executor.adapters.peft import CONFIG, WEIGHTS
from pagewire.v1.executor_pb2 import FoundAdapter

logger = logging.getLogger(__name__)

_MOST = 10_000  # folders and .gguf files that a look takes in
_MOST_ENTRIES = 100_000  # of any kind
# Seconds since the last change after which files that were not seen before count as complete.
_SETTLED_S = 2.0

# (modified at, ns; bytes; inode) of each file of an adapter
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Read:
    """The outcome of reading an adapter."""

    stamp: _Stamp | None  # taken before; None: nothing was there
    digest: str = ""
    problem: str = ""


class Directory:
    """Looks at the directory, on any one thread at a time; what was read and hidden is noted by others."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._reads: dict[str, _Read] = {}  # by name: the latest
        self._seen: dict[str, _Stamp] = {}  # by name, in the last look
        self._hidden: dict[str, set[_Stamp | None]] = {}  # by name: contents that are not to be found
        self._found_last: list[FoundAdapter] = []
        self._complaint = ""  # that was logged last

    def look(self) -> list[FoundAdapter]:
        """Returns the adapters that lie there, in the order of their names; those of the last look, if the directory
        cannot be read now: a disk that is away for a moment takes no adapter from requests."""
        if (seen := self._look()) is None:
            return self._found_last
        now, found = time.time_ns(), list[FoundAdapter]()
        for name, stamp in seen.items():
            if stamp in self._hidden.get(name, ()):
                continue
            self._hidden.pop(name, None)
            read = self._reads.get(name)
            settled = self._seen.get(name) == stamp or now - max(one[0] for one in stamp) > _SETTLED_S * 1e9
            if read is not None and (read.stamp == stamp or not settled):
                found.append(self._found(name, read.digest, read.problem))
            elif settled:
                found.append(self._found(name))
        self._seen = seen
        for noted in (self._reads, self._hidden):
            for name in noted.keys() - seen.keys():
                noted.pop(name, None)
        self._found_last = found
        return found

    def _found(self, name: str, digest: str = "", problem: str = "") -> FoundAdapter:
        return FoundAdapter(name=name, path=str(Path(self.path, name)), digest=digest, problem=problem)

    def _look(self) -> dict[str, _Stamp] | None:
        try:
            with os.scandir(self.path) as entries:
                listed = list(islice(entries, _MOST_ENTRIES + 1))
        except OSError as error:
            what = f"--lora-dir {self.path} cannot be read ({error.strerror}); its adapters are as they were last seen"
            self._complain(what)
            return None
        names = [entry.name for entry in listed if entry.name.endswith(".gguf") or _is_folder(entry)]
        unfit = [name for name in names if not is_adapter_name(name)]
        if len(names) > _MOST or len(listed) > _MOST_ENTRIES:
            self._complain(f"--lora-dir {self.path} has too many entries: some are not found; move some elsewhere")
        elif unfit:
            what = f"--lora-dir {self.path}: requests cannot name {unfit[0]!r:.100}; use letters, digits and ._:+@-"
            self._complain(what)
        stamps = {name: self.stamp(name) for name in sorted(set(names).difference(unfit))[:_MOST]}
        return {name: stamp for name, stamp in stamps.items() if stamp is not None}

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            logger.warning("%s", what)
        self._complaint = what

    def stamp(self, name: str) -> _Stamp | None:
        """Returns what tells the present files of an adapter from others; None: there are none."""
        path = Path(self.path, name)
        first = path if name.endswith(".gguf") else path / CONFIG
        return (*_stamps(first, path / WEIGHTS),) if any(_stamps(first)) else None

    # -- what happens to the adapters --------------------------------------------------------------------------------

    def name_of(self, path: str) -> str | None:
        """Returns the name of the adapter at this path, if that is in the directory."""
        return Path(path).name if Path(path).parent == Path(self.path) else None

    def on_read(self, name: str, stamp: _Stamp | None, digest: str = "", problem: str = "") -> None:
        """Takes in what was read, or why that failed. stamp: as it was before."""
        self._reads[name] = _Read(stamp, digest, problem)

    def hide(self, name: str) -> None:
        """Lets the adapter be found again only once its files have changed."""
        read = self._reads.get(name)
        self._hidden[name] = {self._seen.get(name), None if read is None else read.stamp}

    def show(self, name: str) -> None:
        """Lets the adapter be found."""
        self._hidden.pop(name, None)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, for one
        return False


def _stamps(*paths: Path) -> Iterator[tuple[int, int, int]]:
    """Yields the stamp of each of these that is a file."""
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield found.st_mtime_ns, found.st_size, found.st_ino
