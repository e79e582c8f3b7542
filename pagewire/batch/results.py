"""The answers of a batch: lines that are appended to files, each completely or not at all."""

import errno
import fcntl
import json
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.batch.lines import Line


@dataclass(frozen=True)
class Answer:
    """The answer of a server to one request."""

    status: int
    body: bytes
    request_id: str
    retry_after: float = 0.0  # seconds

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class ResultsInUse(Exception):
    """Raised when another process appends to these files."""


class NotResults(Exception):
    """Raised for a file that does not contain answers of a batch."""


@dataclass
class Usage:
    """The total tokens of all answers."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, body: dict[str, Any]) -> None:
        """Adds the usage in an answer of any API; Anthropic's `input_tokens` exclude cached tokens."""
        usage = body.get("usage")
        if not isinstance(usage, dict):
            return
        apart = _count(usage, "cache_read_input_tokens")
        self.input_tokens += _count(usage, "prompt_tokens", "input_tokens") + apart
        self.output_tokens += _count(usage, "completion_tokens", "output_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.cached_tokens += _count(details, "cached_tokens") + apart
        details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.reasoning_tokens += _count(details, "reasoning_tokens", "thinking_tokens")


def _count(usage: Any, *names: str) -> int:
    values = (usage.get(name) for name in names) if isinstance(usage, dict) else ()
    return next((value for value in values if isinstance(value, int)), 0)


class Results:
    """Appends to a file of answers and one of errors, which may be the same; this process locks both until close().

    Files that are opened again are continued at their end; an incomplete last line is removed. Any thread may call
    methods.
    """

    def __init__(self, outputs: Path, errors: Path) -> None:
        """Opens the files. Raises ResultsInUse, NotResults or OSError."""
        self.done: set[str] = set()  # custom ids
        self.num_completed = 0
        self.num_failed = 0
        self.usage = Usage()
        self._lock = threading.Lock()
        self._files: list[_Appended] = []
        try:
            for path in dict.fromkeys((outputs, errors)):
                self._files.append(_Appended(path))
                for number, line in enumerate(self._files[-1].read(), 1):
                    self._count(line, f"{path}, line {number}")
        except BaseException:
            self.close()
            raise

    def add(self, line: Line, answer: Answer) -> None:
        """Writes an answer. Raises OSError, with the files unchanged."""
        parsed, body = _one_line(answer.body)
        response = b'{"status_code": %d, "request_id": %s, "body": %s}' % (
            answer.status,
            json.dumps(answer.request_id).encode(),
            body,
        )
        if self._append(line, response, b"null", answer.is_success):
            self.usage.add(parsed)

    def add_error(self, line: Line, code: str, message: str) -> None:
        """Writes the error of a request without an answer. Raises OSError, with the files unchanged."""
        self._append(line, b"null", json.dumps({"code": code, "message": message}).encode(), False)

    def close(self) -> None:
        with self._lock:
            for file in self._files:
                file.close()

    def _append(self, line: Line, response: bytes, error: bytes, success: bool) -> bool:
        """Writes the result, and returns whether the line had none before."""
        names = json.dumps({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id})[:-1].encode()
        text = b'%s, "response": %s, "error": %s}\n' % (names, response, error)
        with self._lock:
            if line.custom_id in self.done:
                return False
            self._files[0 if success else -1].append(text)
            self._note(line.custom_id, success)
            return True

    def _note(self, custom_id: str, success: bool) -> None:
        self.done.add(custom_id)
        self.num_completed += success
        self.num_failed += not success

    def _count(self, raw: bytes, place: str) -> None:
        try:
            line = json.loads(raw)
            response, custom_id = line["response"], line["custom_id"]
            success = response is not None and 200 <= response["status_code"] < 300
            body = response["body"] if response is not None else {}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise NotResults(f"{place} is not the answer of a batch") from None
        self._note(custom_id, success)
        if isinstance(body, dict):
            self.usage.add(body)


class _Appended:
    """A file of complete lines, to which only this process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ResultsInUse(f"{path} is being written by another process") from None
        self._size = 0

    def read(self) -> Iterator[bytes]:
        """Yields the existing lines; an incomplete last line is removed."""
        with self._path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._size += len(line)
                    yield line
        os.ftruncate(self._file, self._size)

    def append(self, text: bytes) -> None:
        """Appends text. Raises OSError, with the file unchanged."""
        if self._file < 0:
            raise OSError(errno.EBADF, "closed")
        try:
            rest = memoryview(text)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(text)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _one_line(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Returns the JSON object of a body, and its text without line ends; any other body becomes the message of an
    error."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        parsed = {"error": {"message": body.decode("utf-8", "replace")[:1000]}}
        return parsed, json.dumps(parsed).encode()
    return parsed, body if b"\n" not in body and b"\r" not in body else json.dumps(parsed).encode()
