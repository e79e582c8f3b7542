"""An upload: multipart/form-data, with a file that is written to the disk as it arrives."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.failure import storage_failure

MAX_FIELD_BYTES = 64 * 1024  # bytes of all fields except the file
WRITE_BYTES = 1024 * 1024


class Upload:
    """Parses a body piece by piece. Then `fields` has all fields but the file, which has `filename` and `size`."""

    def __init__(self, content_type: str, out: BinaryIO, max_bytes: int) -> None:
        """Raises ApiError for another content type."""
        kind, parameters = parse_options_header(content_type)
        boundary = parameters.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "send the file as multipart/form-data with the fields `file` and `purpose`")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._out = out
        self._max_bytes = max_bytes
        self._fields: dict[str, bytearray] = {}
        self._field_bytes = 0
        self._header = b""
        self._value = b""
        self._name = ""
        self._is_file = False
        self._content = bytearray()
        self._complete = False
        self._parser = self._make_parser(boundary)

    async def read(self, stream: AsyncIterator[bytes]) -> None:
        """Raises ApiError, 413 for a file that is too large, and OSError."""
        try:
            async for piece in stream:
                self._parser.write(piece)
                if len(self._content) >= WRITE_BYTES:
                    await self._flush()
        except FormParserError as error:
            raise ApiError(400, f"the body is not valid multipart/form-data: {error}") from error
        if not self._complete:
            raise ApiError(400, "the body is not valid multipart/form-data: it ends too early")
        if self.filename is None:
            raise ApiError(400, "the file is missing: send it as the field `file`", param="file")
        for name, value in self._fields.items():
            try:
                self.fields[name] = value.decode()
            except UnicodeDecodeError:
                raise ApiError(400, f"{name}: not valid UTF-8", param=name) from None
        await self._flush()

    def _make_parser(self, boundary: bytes) -> MultipartParser:
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._part_begins,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_data,
            "on_end": self._end,
        }
        try:
            return MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise ApiError(400, f"the boundary of the multipart/form-data cannot be used: {error}") from error

    async def _flush(self) -> None:
        content, self._content = self._content, bytearray()
        await asyncio.to_thread(self._write, memoryview(content))

    def _write(self, rest: memoryview) -> None:
        while rest:  # on a disk that is almost full, only a part is written, and the next write raises
            rest = rest[self._out.write(rest) :]

    # Callbacks of the parser.

    def _part_begins(self) -> None:
        self._name, self._is_file = "", False

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            self._is_file = self._name == "file"
            if self._is_file:
                if self.filename is not None:
                    raise ApiError(400, "the body has several files; upload one at a time", param="file")
                self.filename = options.get(b"filename", b"upload").decode("utf-8", "replace")
        self._header = self._value = b""

    def _headers_end(self) -> None:
        if not self._name:
            raise ApiError(400, "a part of the multipart body has no name")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size += end - start
            if self.size > self._max_bytes:
                raise ApiError(413, f"the file is larger than {self._max_bytes} bytes", param="file")
            self._content += data[start:end]
            return
        self._field_bytes += end - start
        if self._field_bytes > MAX_FIELD_BYTES:
            raise ApiError(413, "the fields of the form are too large")
        self._fields.setdefault(self._name, bytearray()).extend(data[start:end])

    def _end(self) -> None:
        self._complete = True


async def save(path: Path, content_type: str, stream: AsyncIterator[bytes], max_bytes: int) -> Upload:
    """Saves the file of an upload at `path`, or nothing if that fails. Raises ApiError, 507 for a full disk."""
    with _new_file(path) as out:
        upload = Upload(content_type, out, max_bytes)
        await upload.read(stream)
        return upload


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("xb", buffering=0) as out:
            yield out
    except OSError as error:
        path.unlink(missing_ok=True)
        raise storage_error(error, path) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def storage_error(error: OSError, path: Path) -> ApiError:
    return storage_failure(path.parent.parent, error, is_full=error.errno in (errno.ENOSPC, errno.EDQUOT))
