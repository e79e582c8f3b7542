"""The memory of slots, which other executors of the host can read.

It is anonymous: a process of the same user opens it through /proc by the owner's process and descriptor, and it is
freed with the last process that has it, however that ends. A table tells the block in each slot and its checksum. A
reader copies first and compares the checksum then, so nothing needs a lock between processes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from pagewire.services.executor.tiers.contents import HASH_BYTES, Key

_HEAD_BYTES = 4096
_ENTRY = np.dtype([("hash", np.uint8, HASH_BYTES), ("checksum", np.uint64), ("is_there", np.uint64)])
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _divided(memory: np.ndarray, sizes: Sequence[tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the table _ENTRY [slots] and the slots uint8 [slots, block_bytes] of each group. sizes: (slots,
    block_bytes)s."""
    tables, parts, end = [], [], _HEAD_BYTES
    for num_slots, block_bytes in sizes:
        start, end = end, end + _pages(num_slots * _ENTRY.itemsize)
        tables.append(memory[start : start + num_slots * _ENTRY.itemsize].view(_ENTRY))
        start, end = end, end + _pages(num_slots * block_bytes)
        parts.append(memory[start : start + num_slots * block_bytes].reshape(num_slots, block_bytes))
    return tables, parts


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Memory:
    """The memory of an executor. Pages that were never used take no room."""

    def __init__(self, num_slots: Sequence[int], block_bytes: Sequence[int]) -> None:
        """num_slots, block_bytes: of each group."""
        sizes = list(zip(num_slots, block_bytes, strict=True))
        whole = _HEAD_BYTES + sum(_pages(n * _ENTRY.itemsize) + _pages(n * size) for n, size in sizes)
        self._descriptor = os.memfd_create("pagewire-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, whole)
        self.bytes = np.frombuffer(mmap.mmap(self._descriptor, whole), dtype=np.uint8)
        self._tables, self.parts = _divided(self.bytes, sizes)
        token = secrets.token_hex(8)
        head = json.dumps({"token": token, "sizes": sizes}).encode()
        self.bytes[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        # How other processes find it.
        self.name = f"{_BOOT_ID.read_text().strip()}/{os.getpid()}/{self._descriptor}/{token}"

    def show(self, group: int, index: int, digest: bytes, checksum: int) -> None:
        """Lets other executors find a block that is complete."""
        entry = self._tables[group][index]
        entry["hash"], entry["checksum"] = np.frombuffer(digest, np.uint8), checksum
        entry["is_there"] = 1

    def hide(self, group: int, index: int) -> None:
        """Lets other executors find the block in a slot no more."""
        self._tables[group]["is_there"][index] = 0

    def close(self) -> None:
        """Frees it as soon as no process reads it."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


class OtherMemory:
    """The memory of another executor of this host, to be read."""

    def __init__(self, name: str) -> None:
        """name: `Memory.name`. Raises OSError or ValueError if it cannot be read: it is on another host, or gone."""
        boot, pid, descriptor, token = name.split("/")
        if boot != _BOOT_ID.read_text().strip():
            raise ValueError("it is on another host")
        opened = os.open(f"/proc/{int(pid)}/fd/{int(descriptor)}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            memory = np.frombuffer(mmap.mmap(opened, 0, prot=mmap.PROT_READ), dtype=np.uint8)
        finally:
            os.close(opened)
        head = json.loads(memory[:_HEAD_BYTES].tobytes().rstrip(b"\0"))
        if head["token"] != token:
            raise ValueError("another process has taken its place")
        self._tables, self._parts = _divided(memory, head["sizes"])

    def places(self, keys: Iterable[Key]) -> dict[Key, int]:
        """Returns the slots of those blocks that are there, by one pass over the tables."""
        wanted, found = set(keys), dict[Key, int]()
        for group, table in enumerate(self._tables):
            held = np.flatnonzero(table["is_there"])
            digests = table["hash"][held].tobytes()
            for place, index in enumerate(held.tolist()):
                key = group, digests[place * HASH_BYTES : (place + 1) * HASH_BYTES]
                if key in wanted:
                    found[key] = index
        return found

    def copy(self, key: Key, index: int, into: np.ndarray) -> int | None:
        """Copies a block from the slot in which it was found, and returns its checksum; None if it is there no more."""
        group, digest = key
        entry = self._tables[group][index]
        checksum = int(entry["checksum"])
        np.copyto(into, self._parts[group][index])
        is_same = bool(entry["is_there"]) and entry["hash"].tobytes() == digest
        return checksum if is_same and xxhash.xxh3_64_intdigest(into.data) == checksum else None
