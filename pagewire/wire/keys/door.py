"""Checks API keys and their limits."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from pagewire.wire.keys.entry import Key, digest_of
from pagewire.wire.keys.key_file import CHECK_INTERVAL_S, KeyFile
from pagewire.wire.status.rpc_error import RpcError


class _Use:
    """The use of one key's limits."""

    def __init__(self, key: Key) -> None:
        self._left = float(key.requests_per_minute)
        self._at = time.monotonic()
        self._num_running = 0

    @contextmanager
    def one(self, key: Key) -> Iterator[None]:
        """Counts a request while it runs. Raises RpcError RESOURCE_EXHAUSTED."""
        if key.max_running and self._num_running >= key.max_running:
            message = (
                f"{key.name} has as many running requests as its key allows ({key.max_running}); wait until one ends"
            )
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        if key.requests_per_minute:
            self._take(key)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def _take(self, key: Key) -> None:
        """Takes one request from a bucket that refills in a minute. Raises RpcError RESOURCE_EXHAUSTED."""
        now, rate = time.monotonic(), key.requests_per_minute / 60
        self._left = min(float(key.requests_per_minute), self._left + (now - self._at) * rate)
        self._at = now
        if self._left < 1:
            message = f"{key.name} has sent {key.requests_per_minute} requests a minute, as many as its key allows"
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_delay=(1 - self._left) / rate)
        self._left -= 1


class Door:
    """Checks the keys of requests, and counts the requests of each."""

    def __init__(
        self, api_keys: Sequence[str] = (), key_file: str | None = None, check_interval: float = CHECK_INTERVAL_S
    ) -> None:
        """Without keys and a file, no key is required. api_keys: those of the operator, with all rights.
        check_interval: seconds between checks of the file.

        Raises StartupError for a file that cannot be read.
        """
        digests = [digest_of(key.encode()) for key in api_keys]
        self._ours = {digest: Key(name="", digest=digest, admin=True) for digest in digests}
        self._file = KeyFile(key_file, check_interval) if key_file else None
        self._uses: dict[str, _Use] = {}

    @property
    def is_open(self) -> bool:
        """True if no key is required."""
        return not self._ours and self._file is None

    def find(self, given: Iterable[bytes]) -> Key | None:
        """Returns the first known key; None if none is known.

        Keys are compared by their hashes, so that the time of a comparison reveals nothing about a key.
        """
        others = dict[bytes, Key]() if self._file is None else self._file.keys()
        for key in filter(None, map(bytes.strip, given)):
            digest = digest_of(key)
            if (known := self._ours.get(digest) or others.get(digest)) is not None:
                return known
        return None

    @contextmanager
    def admit(self, key: Key) -> Iterator[None]:
        """Counts a request while it runs. Raises RpcError RESOURCE_EXHAUSTED with a time to retry."""
        if key.name not in self._uses:
            self._uses[key.name] = _Use(key)
        with self._uses[key.name].one(key):
            yield
