"""A tokenizer worker in a process of its own: it loads the tokenizer and answers calls over a pipe."""

import logging
import multiprocessing
import signal
from multiprocessing.connection import Connection
from typing import Any

from pagewire.services.tokenizer.codec import Codec, CodecSource

logger = logging.getLogger(__name__)

# Never fork: gRPC does not survive it.
_SPAWN = multiprocessing.get_context("spawn")


class WorkerDiedError(RuntimeError):
    """The process ended in the middle of a call."""


class WorkerProcess:
    """One worker; used by one thread at a time. After WorkerDiedError the next call starts a new process."""

    def __init__(self, source: CodecSource) -> None:
        self._source = source
        self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Codec.method(*args) in the process. Raises what it raises, or WorkerDiedError."""
        if not self._process.is_alive():
            self.close()
            self._start()
        try:
            self._connection.send((method, args))
            result, error = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise WorkerDiedError(f"tokenizer worker died (exit code {self._process.exitcode})") from error
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """The process sees the pipe's end; one that is busy is ended."""
        self._connection.close()
        self._process.join(timeout=0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_work, args=(theirs, self._source), name="tokenizer-worker", daemon=True)
        self._process.start()
        theirs.close()


def _work(connection: Connection, source: CodecSource) -> None:
    # Ctrl-C reaches the whole group; the service decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    codec = Codec(source)
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, OSError):
            return
        result, failure = None, None
        try:
            result = getattr(codec, method)(*args)
        except Exception as error:
            failure = error
        connection.send((result, failure))
