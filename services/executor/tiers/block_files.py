"""The files of a directory of blocks, one for each: a header with a checksum, then the contents.

A file is written under another name and renamed, so it is there as a whole or not at all; what is damaged later fails
its checksum. Every call may wait for the disk, and may raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from pagewire.services.executor.tiers.contents import Key

_HEADER = struct.Struct("<8s32sIIQQ")  # magic, hash, group, 0, length, checksum
HEADER_BYTES = _HEADER.size
_MAGIC = b"PGWKV\0\0\1"
_BLOCK_NAME = re.compile(r"([0-9a-f]{64})-(\d{1,3})")
_LOCKED_S = 2.0  # longest wait for another executor that deletes files


class Damaged(Exception):
    """A file does not hold what its name says."""


def file_of(root: Path, key: Key) -> Path:
    """Returns the file of a block. root: the folder of its format."""
    name = key[1].hex()
    return root / name[:2] / f"{name}-{key[0]}"


def key_of(name: str) -> Key:
    """Returns the block of a file with this name."""
    digest, _, group = name.partition("-")
    return int(group), bytes.fromhex(digest)


def blocks_in(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields the files of blocks. A link or a pipe of such a name is none: it may lead nowhere, or never end."""
    for entry in os.scandir(folder):
        if _BLOCK_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            yield entry


def write_block(path: Path, scratch: Path, key: Key, contents: np.ndarray, checksum: int) -> None:
    """Writes a block. scratch: the file until it is whole."""
    header = _HEADER.pack(_MAGIC, key[1], key[0], 0, contents.nbytes, checksum)
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


def read_block(path: Path, key: Key, into: np.ndarray) -> int:
    """Reads a block; returns its checksum, and notes that it was used. Raises FileNotFoundError or Damaged."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
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
    finally:
        os.close(descriptor)
    return int(checksum)


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
def locked(path: Path) -> Iterator[None]:
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
