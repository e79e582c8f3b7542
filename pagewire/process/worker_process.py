"""A worker process that makes an object, such as a tokenizer, and answers calls of its methods over a pipe."""

import logging
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

logger = logging.getLogger(__name__)

# Never fork: gRPC does not survive it.
_SPAWN = multiprocessing.get_context("spawn")


class WorkerDiedError(RuntimeError):
    """The process ended in the middle of a call."""


class WorkerTooSlowError(RuntimeError):
    """The call took too long; its process was ended."""


class WorkerProcess:
    """One worker; used by one thread at a time. After either error above the next call starts a new process."""

    def __init__(self, make: Callable[[], Any], name: str = "tokenizer worker") -> None:
        """make: makes the object; it is pickled and called in the process. name: for errors."""
        self._make = make
        self._name = name
        self._start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Returns False if the next call starts a new process."""
        return self._process.is_alive()

    def call(self, method: str, args: tuple[Any, ...], timeout: float | None = None) -> Any:
        """Calls a method of the object, and raises its exceptions, those of `make`, or WorkerDiedError.

        timeout: seconds, including the start of a new process, after which it raises WorkerTooSlowError.
        """
        if not self._process.is_alive():
            self.close()
            self._start()
        try:
            self._connection.send((method, args))
            if timeout is not None and not self._connection.poll(timeout):
                self._process.kill()
                self._process.join()
                raise WorkerTooSlowError(f"a {self._name} did not answer within {timeout:g} seconds")
            result, error = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise WorkerDiedError(f"{self._name} died (exit code {self._process.exitcode})") from error
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Ends the process, by the end of its pipe, or by a signal if it is busy."""
        self._connection.close()
        self._process.join(timeout=0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_work, args=(theirs, self._make), name=self._name.replace(" ", "-"), daemon=True
        )
        self._process.start()
        theirs.close()


def _work(connection: Connection, make: Callable[[], Any]) -> None:
    # Ctrl-C reaches the whole group; the service decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    made, defect = None, None
    try:
        made = make()
    except Exception as error:
        defect = error
    while True:
        try:
            method, args = connection.recv()
        except (EOFError, OSError):
            return
        result, failure = None, defect
        try:
            if made is not None:
                result = getattr(made, method)(*args)
        except Exception as error:
            failure = error
        connection.send((result, failure))
