"""A directory of blocks, which survives restarts and is shared by the executors of a host.

A block is one file, DIR/<format>/<first byte of the hash>/<hash>-<group>: a header with a checksum, then the contents.
It is written under another name and renamed, so it is there as a whole or not at all; what is damaged later fails its
checksum. A file's time is that of its last use; when there is no room, the oldest files of all formats are deleted.

Executors learn from the times of the folders what others wrote and deleted. Every call may wait for the disk, and may
raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from pagewire.services.executor.tiers.contents import Contents, Key

_HEADER = struct.Struct("<8s32sIIQQ")  # magic, hash, group, 0, length, checksum
_MAGIC = b"PGWKV\0\0\1"
_SCRATCH = "new"  # folder of files that are being written
_ROOT_NAME, _FOLDER_NAME = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{2}")
_BLOCK_NAME = re.compile(r"([0-9a-f]{64})-(\d{1,3})")
# The part of the bound that is freed at once, so that not each block has to find the oldest ones.
_SLACK = 1 / 32
# Times of folders advance with the clock's ticks: changes within one may leave the same time.
_TICK_NS = 20_000_000
_ABANDONED_S = 60.0  # age of a file that its writer has not renamed
_LOCKED_S = 2.0  # longest wait for another executor that deletes files


class Damaged(Exception):
    """A file does not hold what its name says."""


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
        header = _HEADER.pack(_MAGIC, key[1], key[0], 0, contents.nbytes, checksum)
        size = len(header) + contents.nbytes
        if self._num_bytes + size > self.max_bytes:
            self.shrink(self.max_bytes - size - int(self.max_bytes * _SLACK))
        root = self._path / kv_format
        path, scratch = _file(root, key), root / _SCRATCH / secrets.token_hex(8)
        with self._lock:
            self._writing[key] = True
        try:
            _write(scratch, header, contents.data)
            try:
                scratch.rename(path)
            except FileNotFoundError:
                path.parent.mkdir(exist_ok=True)
                scratch.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise
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
        path = _file(self._root, key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            self._drop(path, key)
            raise
        try:
            header = bytearray(_HEADER.size)
            num_read = _read(descriptor, header, into.data)
            magic, digest, group, _, length, checksum = _HEADER.unpack(header)
            is_whole = num_read == len(header) + into.nbytes == os.fstat(descriptor).st_size
            if not is_whole or (magic, digest, group, length) != (_MAGIC, key[1], key[0], into.nbytes):
                raise Damaged(path)
            if xxhash.xxh3_64_intdigest(into.data) != checksum:
                raise Damaged(path)
            with contextlib.suppress(OSError):  # others can read it, and not set its time
                os.utime(descriptor)
        except Damaged:
            with contextlib.suppress(OSError):  # of a directory that is read only
                self.forget(key)
            raise
        finally:
            os.close(descriptor)
        return int(checksum)

    def forget(self, key: Key) -> None:
        """Deletes a block, and lets one that is being written not appear."""
        path = _file(self._root, key)
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
            files = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in _blocks(path)}
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
                self.contents.remove(_key(name))
            for name in new:
                group, _ = key = _key(name)
                if group < len(self._block_bytes) and found.files[name] == _HEADER.size + self._block_bytes[group]:
                    self.contents.add(key)

    def make_room(self) -> None:
        """Deletes some of the oldest files, although the bound is kept."""
        self.shrink(int(self._num_bytes * (1 - _SLACK)))

    def shrink(self, most: int) -> None:
        """Deletes the oldest files until there are `most` bytes. Raises OSError if others keep it locked."""
        with _locked(self._path / "lock"):
            self.look()
            if self._num_bytes <= most:
                return
            files = []
            for folder in self._subfolders():
                for entry in _blocks(folder):
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


def _blocks(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields the files of blocks. A link or a pipe of such a name is none: it may lead nowhere, or never end."""
    for entry in os.scandir(folder):
        if _BLOCK_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            yield entry


def _file(root: Path, key: Key) -> Path:
    name = key[1].hex()
    return root / name[:2] / f"{name}-{key[0]}"


def _key(name: str) -> Key:
    digest, _, group = name.partition("-")
    return int(group), bytes.fromhex(digest)


def _write(path: Path, header: bytes, contents: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        left = [memoryview(header), contents]
        while left:
            written = os.writev(descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]
    finally:
        os.close(descriptor)


def _read(descriptor: int, header: bytearray, contents: memoryview) -> int:
    """Fills both, if the file has as much; returns the bytes that were read."""
    num_read = os.preadv(descriptor, [header, contents], 0)
    while len(header) <= num_read < len(header) + len(contents):
        more = os.preadv(descriptor, [contents[num_read - len(header) :]], num_read)
        if not more:
            break
        num_read += more
    return num_read


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock among processes. Raises OSError if it cannot be had for long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + _LOCKED_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError(errno.EAGAIN, "another process keeps it locked", str(path)) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)
