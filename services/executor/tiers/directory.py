"""A directory of blocks, which survives restarts and is shared by the executors of a host.

A block is one file, DIR/<format>/<first byte of the hash>/<hash>-<group>, as in `block_files`. A file's time is that of
its last use; when there is no room, the oldest files of all formats are deleted.

Executors learn from the times of the folders what others wrote and deleted. Every call may wait for the disk, and may
raise OSError.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pagewire.services.executor.tiers.block_files import (
    HEADER_BYTES,
    Damaged,
    blocks_in,
    file_of,
    key_of,
    locked,
    read_block,
    write_block,
)
from pagewire.services.executor.tiers.contents import Contents, Key

_SCRATCH = "new"  # folder of files that are being written
_RESET = "reset"  # file with the time of the latest reset
_ROOT_NAME, _FOLDER_NAME = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{2}")
# The part of the bound that is freed at once, so that not each block has to find the oldest ones.
_SLACK = 1 / 32
# Times of folders advance with the clock's ticks: changes within one may leave the same time.
_TICK_NS = 20_000_000
_ABANDONED_S = 60.0  # age of a file that its writer has not renamed


@dataclass(eq=False)
class _Folder:
    """The files of a folder, by the last look at it and by our own changes since then."""

    modified_ns: int = 0  # its time before the look; 0: look again
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes
    num_changes: int = 0  # of our own


class Directory:
    """The blocks of one format, in a directory with a bound for those of all formats."""

    def __init__(self, path: str, max_bytes: int, block_bytes: list[int]) -> None:
        """block_bytes: of each group."""
        self.contents = Contents()
        self.max_bytes = max_bytes
        self._path = Path(path)
        self._root = self._path
        self._block_bytes = block_bytes
        self._lock = threading.Lock()  # of what follows; held while nothing waits for the disk
        self._folders: dict[Path, _Folder] = {}
        self._num_bytes = 0
        self._writing: dict[Key, bool] = {}  # blocks that are being written, and whether they are still wanted

    def open(self, kv_format: str) -> None:
        """Makes this the format to read and write, and finds what is there."""
        self.contents.clear()
        with self._lock:
            self._root = self._path / kv_format
            self._folders.clear()
            self._num_bytes = 0
        self.look()
        for entry in os.scandir(self.scratch):  # what killed writers have left
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_S:
                    Path(entry.path).unlink()

    def store_id(self) -> str:
        """Returns what identifies the contents: all executors that see these files return the same."""
        path, made = self._root / "store", self.scratch / secrets.token_hex(8)
        if not path.exists():
            made.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
            made.unlink()
        return path.read_text(errors="replace")

    def reset_at(self) -> int:
        """Returns the time of the latest reset that the contents have followed; 0: there was none."""
        path = self._root / _RESET
        return int(text) if path.exists() and (text := path.read_text(errors="replace")).isdecimal() else 0

    def keep_reset(self, reset_at: int) -> None:
        """Notes that the contents have followed a reset."""
        if reset_at > self.reset_at():
            made = self.scratch / secrets.token_hex(8)
            made.write_text(str(reset_at))
            made.rename(self._root / _RESET)

    @property
    def scratch(self) -> Path:
        """The folder of files that are being written."""
        return self._root / _SCRATCH

    @property
    def num_bytes(self) -> int:
        """Bytes of the files of all formats."""
        return self._num_bytes

    # -- blocks ------------------------------------------------------------------------------------------------------

    def write(self, kv_format: str, key: Key, contents: np.ndarray, checksum: int) -> int:
        """Writes a block of a format that is or was open; returns the bytes that were written."""
        size = HEADER_BYTES + contents.nbytes
        if self._num_bytes + size > self.max_bytes:
            self.shrink(self.max_bytes - size - int(self.max_bytes * _SLACK))
        root = self._path / kv_format
        path, scratch = file_of(root, key), root / _SCRATCH / secrets.token_hex(8)
        with self._lock:
            self._writing[key] = True
        try:
            write_block(path, scratch, key, contents, checksum)
        finally:
            with self._lock:
                is_wanted = self._writing.pop(key)
        if not is_wanted:
            path.unlink(missing_ok=True)
        elif root == self._root:
            with self._lock:
                self._note(path, size)
            self.contents.add(key)
        return size

    def read(self, key: Key, into: np.ndarray) -> int:
        """Reads a block; returns its checksum. Raises FileNotFoundError, or Damaged, after which it is gone."""
        path = file_of(self._root, key)
        try:
            return read_block(path, key, into)
        except FileNotFoundError:
            self._drop(path, key)
            raise
        except Damaged:
            with contextlib.suppress(OSError):  # of a directory that is read only
                self.forget(key)
            raise

    def forget(self, key: Key) -> None:
        """Deletes a block, and lets one that is being written not appear."""
        path = file_of(self._root, key)
        with self._lock:
            if key in self._writing:
                self._writing[key] = False
        self._drop(path, key)
        path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Deletes all blocks of the format, and lets those that are being written not appear."""
        with self._lock:
            self._writing = dict.fromkeys(self._writing, False)
        self.look()
        with self._lock:
            own = [(path, list(folder.files)) for path, folder in self._folders.items() if path.parent == self._root]
        self.contents.clear()
        for path, names in own:
            for name in names:
                (path / name).unlink(missing_ok=True)
        self.look()

    def _note(self, path: Path, size: int | None) -> None:
        """Notes a file, or with None that there is none. Call it with the lock."""
        folder = self._folders.setdefault(path.parent, _Folder())
        before = folder.files.pop(path.name, 0)
        if size is not None:
            folder.files[path.name] = size
        folder.num_changes += 1
        self._num_bytes += (size or 0) - before

    def _drop(self, path: Path, key: Key) -> None:
        with self._lock:
            self._note(path, None)
        self.contents.remove(key)

    # -- the whole directory -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Takes in what others have written and deleted, be it the directory itself."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        with self._lock:
            gone = {path: folder.num_changes for path, folder in self._folders.items()}
        for path in self._subfolders():
            gone.pop(path, None)
            self._look_at(path)
        for path, num_changes in gone.items():
            self._replace(path, _Folder(), num_changes)

    def _subfolders(self) -> Iterator[Path]:
        """Yields the folders with blocks, of all formats."""
        for root in os.scandir(self._path):
            if _ROOT_NAME.fullmatch(root.name) and root.is_dir(follow_symlinks=False):
                for folder in os.scandir(root.path):
                    if _FOLDER_NAME.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                        yield Path(folder.path)

    def _look_at(self, path: Path) -> None:
        with self._lock:
            known = self._folders.setdefault(path, _Folder())
            num_changes = known.num_changes
        try:
            modified_ns = path.stat().st_mtime_ns
            if modified_ns == known.modified_ns:
                return
            is_settled = time.time_ns() - modified_ns > _TICK_NS
            files = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in blocks_in(path)}
        except FileNotFoundError:
            modified_ns, is_settled, files = 0, False, {}
        self._replace(path, _Folder(modified_ns if is_settled else 0, files), num_changes)

    def _replace(self, path: Path, found: _Folder, num_changes: int) -> None:
        with self._lock:
            known = self._folders[path]
            if known.num_changes != num_changes:
                return  # it changed during the look: the next one finds out
            known.num_changes = 0
            known.modified_ns = found.modified_ns
            self._num_bytes += sum(found.files.values()) - sum(known.files.values())
            gone, new = known.files.keys() - found.files.keys(), found.files.keys() - known.files.keys()
            known.files = found.files
            is_own = path.parent == self._root
        if is_own:
            for name in gone:
                self.contents.remove(key_of(name))
            for name in new:
                group, _ = key = key_of(name)
                if group < len(self._block_bytes) and found.files[name] == HEADER_BYTES + self._block_bytes[group]:
                    self.contents.add(key)

    def make_room(self) -> None:
        """Deletes some of the oldest files, although the bound is kept."""
        self.shrink(int(self._num_bytes * (1 - _SLACK)))

    def shrink(self, most: int) -> None:
        """Deletes the oldest files until there are `most` bytes. Raises OSError if others keep it locked."""
        with locked(self._path / "lock"):
            self.look()
            if self._num_bytes <= most:
                return
            files = []
            for folder in self._subfolders():
                for entry in blocks_in(folder):
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        files.append((stat.st_mtime_ns, entry.path, stat.st_size))
            held = sum(size for _, _, size in files)
            for _, path, size in sorted(files):
                if held <= most:
                    break
                Path(path).unlink(missing_ok=True)
                held -= size
            self.look()
