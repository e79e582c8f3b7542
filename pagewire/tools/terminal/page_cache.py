"""Files in the kernel's page cache: with `pagewire model pull --warm`, the first start finds the weights in memory."""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from pagewire.process import cgroup

_CHUNK = 16 << 20  # bytes
_MEMINFO = Path("/proc/meminfo")


def resident(path: Path) -> int:
    """Returns the bytes of the file in memory; 0 if the kernel does not report them (mincore(2) requires the file's
    owner)."""
    size = path.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as data,
    ):
        first = ctypes.c_char.from_buffer(data)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first  # otherwise the map cannot be closed
    return 0 if failed else min(size, sum(page & 1 for page in pages) * mmap.PAGESIZE)


def available() -> int:
    """Returns the bytes that this process can still use, by the machine's free memory and its control group."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = cgroup.available_memory()
    return free if limit is None else min(free, limit)


def warm(files: Sequence[Path]) -> int:
    """Reads each file once, with read-ahead, and returns the bytes that were not in memory before. Raises OSError."""
    buffer = bytearray(_CHUNK)
    read = 0
    for path in files:
        there = resident(path)
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if there >= size:
                continue
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            while file.readinto(buffer):
                pass
        read += size - there
    return read
