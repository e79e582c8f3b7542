"""The adapters that lie in `--lora-dir`: found by looking, and told apart by the times and sizes of their files."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pagewire.config.values.adapter_names import is_adapter_name
from pagewire.services.executor.adapters.peft import CONFIG, WEIGHTS
from pagewire.v1.executor_pb2 import FoundAdapter

logger = logging.getLogger(__name__)

_MOST = 10_000  # folders and .gguf files that a look takes in
_MOST_ENTRIES = 100_000  # of any kind
_MOST_LOGGED = 20  # lines of a look; the next look logs the next ones
_MOST_CHARS = 500  # of a problem
# Seconds since the last change after which files that were not seen before count as complete.
_SETTLED_S = 2.0
# Seconds after which an adapter that could not be read, though its files may be right, may be read again.
_RETRY_S = 30.0
# What becomes of a file that is not there. Any other error may be the disk's.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

# (modified at, ns; bytes; inode; mode; owner; group) of each file of an adapter
_Stamp = tuple[tuple[int, ...], ...]


class _Files(NamedTuple):
    """The files of an adapter, as a look sees them."""

    stamp: _Stamp
    changed_at: int  # Unix time, ns: they, or the name of their folder


@dataclass(frozen=True)
class _Read:
    """The outcome of reading an adapter."""

    stamp: _Stamp | None  # taken before; None: nothing was there
    digest: str = ""
    problem: str = ""
    until: float = float("inf")  # time.monotonic() from which on it may be read again

    def holds(self, stamp: _Stamp) -> bool:
        return self.stamp == stamp and time.monotonic() < self.until


class Directory:
    """Looks at the directory, on any one thread at a time; what was read and hidden is noted by others."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._reads: dict[str, _Read] = {}  # by name: the latest
        self._seen: dict[str, _Files] = {}  # by name, in the last look
        self._hidden: dict[str, set[_Stamp | None]] = {}  # by name: contents that are not to be found
        self._found_last: list[FoundAdapter] = []
        self._complaints: set[str] = set()  # of the last look; they have been logged

    def look(self) -> list[FoundAdapter]:
        """Returns the adapters that lie there, in the order of their names; those of the last look, if the directory
        cannot be read now: a disk that is away for a moment takes no adapter from requests, nor does a file."""
        try:
            with os.scandir(self.path) as entries:
                listed = list(islice(entries, _MOST_ENTRIES + 1))
        except OSError as error:
            what = f"--lora-dir {self.path} cannot be read ({error.strerror}); its adapters are as they were last seen"
            self._complain([what])
            return self._found_last
        seen, failed, complaints = self._look_at(listed)
        self._complain(complaints)
        now, found, before = time.time_ns(), list[FoundAdapter](), {one.name: one for one in self._found_last}
        for name in sorted(seen.keys() | failed.keys()):
            if (files := seen.get(name)) is None:
                if name not in self._hidden:
                    found.append(before.get(name) or self._found(name, problem=failed[name]))
            elif files.stamp not in self._hidden.get(name, ()):
                self._hidden.pop(name, None)
                found += self._of_files(name, files, now)
        self._seen = seen | {name: self._seen[name] for name in failed if name in self._seen}
        for noted in (self._reads, self._hidden):
            for name in noted.keys() - seen.keys() - failed.keys():
                noted.pop(name, None)
        self._found_last = found
        return found

    def _of_files(self, name: str, files: _Files, now: int) -> list[FoundAdapter]:
        """Returns the adapter as its files and what was read of them tell; none while it is being written."""
        stamp, read, before = files.stamp, self._reads.get(name), self._seen.get(name)
        settled = (before is not None and before.stamp == stamp) or (
            now - max(one[0] for one in stamp) > _SETTLED_S * 1e9
        )
        if read is not None and (read.holds(stamp) or not settled):
            return [self._found(name, read.digest, read.problem, files.changed_at)]
        return [self._found(name, changed_at=files.changed_at)] if settled else []

    def _found(self, name: str, digest: str = "", problem: str = "", changed_at: int = 0) -> FoundAdapter:
        path = str(Path(self.path, name))
        return FoundAdapter(name=name, path=path, digest=digest, problem=problem, changed_at=changed_at)

    def _look_at(self, listed: list[os.DirEntry[str]]) -> tuple[dict[str, _Files], dict[str, str], list[str]]:
        """Returns the files of each adapter, why others cannot be looked at, and what is to be logged."""
        complaints, seen, failed = list[str](), dict[str, _Files](), dict[str, str]()
        names = sorted(entry.name for entry in listed if entry.name.endswith(".gguf") or self._may_be_folder(entry))
        if len(names) > _MOST or len(listed) > _MOST_ENTRIES:
            complaints.append(f"--lora-dir {self.path} has too many entries: some are not found; move some elsewhere")
        for name in names[:_MOST]:
            try:
                files = self._files(name)
            except OSError as error:
                failed[name] = f"it cannot be looked at ({error.strerror}); see to its permissions and the disk"
                complaints.append(
                    f"--lora-dir {self.path}: {name!r:.100}, which is as it was last seen: {failed[name]}"
                )
                continue
            if files is not None and is_adapter_name(name):
                seen[name] = files
            elif files is not None:
                what = f"--lora-dir {self.path}: requests cannot name {name!r:.100}; use letters, digits and ._:+@-"
                complaints.append(what)
        return seen, {name: why for name, why in failed.items() if is_adapter_name(name)}, complaints

    def _may_be_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            return entry.is_dir()
        except OSError as error:  # a link to itself, for one
            return error.errno not in _GONE

    def _complain(self, complaints: Iterable[str]) -> None:
        """Logs what was not so in the last look."""
        present = dict.fromkeys(complaints)
        new = list(islice((what for what in present if what not in self._complaints), _MOST_LOGGED))
        for what in new:
            logger.warning("%s", what)
        self._complaints = (self._complaints & present.keys()).union(new)

    def stamp(self, name: str) -> _Stamp | None:
        """Returns what tells the present files of an adapter from others; None: there are none. Raises OSError."""
        files = self._files(name)
        return None if files is None else files.stamp

    def _files(self, name: str) -> _Files | None:
        path = Path(self.path, name)
        whole, config, weights = (_status(one) for one in (path, path / CONFIG, path / WEIGHTS))
        first = whole if name.endswith(".gguf") else config
        if first is None or not stat.S_ISREG(first.st_mode):
            return None
        files = [one for one in (first, weights) if one is not None and stat.S_ISREG(one.st_mode)]
        stamp = tuple((one.st_mtime_ns, one.st_size, one.st_ino, one.st_mode, one.st_uid, one.st_gid) for one in files)
        return _Files(stamp, max(one.st_ctime_ns for one in (whole, *files) if one is not None))

    # -- what happens to the adapters --------------------------------------------------------------------------------

    def name_of(self, path: str) -> str | None:
        """Returns the name of the adapter at this path, if that is in the directory."""
        return Path(path).name if Path(path).parent == Path(self.path) else None

    def on_read(
        self, name: str, stamp: _Stamp | None, digest: str = "", problem: str = "", *, may_pass: bool = False
    ) -> None:
        """Takes in what was read, or why that failed, which is logged once. stamp: as it was before. may_pass: another
        attempt may succeed with the same files."""
        before, problem = self._reads.get(name), problem[:_MOST_CHARS]
        until = time.monotonic() + _RETRY_S if may_pass else float("inf")
        self._reads[name] = _Read(stamp, digest, problem, until)
        if problem and (before is None or (before.stamp, before.problem) != (stamp, problem)):
            when = "now" if may_pass else "until its files change"
            logger.warning("the adapter %s in --lora-dir cannot be served %s: %s", name, when, problem)

    def hide(self, name: str) -> None:
        """Lets the adapter be found again only once its files have changed."""
        read, seen = self._reads.get(name), self._seen.get(name)
        self._hidden[name] = {None if seen is None else seen.stamp, None if read is None else read.stamp}

    def show(self, name: str) -> None:
        """Lets the adapter be found."""
        self._hidden.pop(name, None)


def _status(path: Path) -> os.stat_result | None:
    """Returns None if nothing is there. Raises OSError."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
