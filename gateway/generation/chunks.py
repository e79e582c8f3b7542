"""Chunks: the events of a streamed chat or text completion."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.encoding import DONE, encode, event
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.style import AnswerStyle
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.schema.generation import StreamOptions


class ChunkWriter:
    """The events of one streamed completion. Their common part is encoded once, the choice for each token."""

    def __init__(self, chunk: Body, options: StreamOptions | None, style: AnswerStyle) -> None:
        """chunk: the common part of all events, without choices."""
        self._style = style
        # The usage is sent in one more event at the end; the others have `usage: null`.
        self._include_usage = style.forces_usage or bool(options and options.include_usage)
        # Each event has the current usage instead of null.
        self._continuous_usage = style.forces_usage or bool(
            options and options.include_usage and options.continuous_usage_stats
        )
        self._chunk = msgspec.structs.replace(chunk, usage=None) if self._include_usage else chunk
        self._framed_for: str | None = None  # the version of the weights in the next two
        self._head, self._end = self._frame(None)

    def _frame(self, version: str | None) -> tuple[bytes, bytes]:
        """Returns the bytes before and after a choice."""
        self._framed_for = version
        self._chunk = msgspec.structs.replace(self._chunk, system_fingerprint=self._style.fingerprint(version))
        # No string contains the separator: its quotes would be escaped.
        head, end = event(self._chunk).split(b'"choices":[]')
        return head + b'"choices":[', b"]" + end

    def chunk(
        self,
        out: list[bytes],
        choice: Body,
        usage: UsageTotal,
        extra: Mapping[str, Any] | None = None,
        version: str = "",
    ) -> None:
        """Writes a chunk.

        Args:
            usage: the usage so far.
            extra: more fields of this chunk.
            version: the version of the weights that generate the choice.
        """
        if version and version != self._framed_for:
            self._head, self._end = self._frame(version)
        if extra or self._continuous_usage:
            fields = {"usage": usage.info()} if self._continuous_usage else {}
            out.append(event(msgspec.structs.replace(self._chunk, choices=[choice], **fields, **(extra or {}))))
        else:
            out += (self._head, encode(choice), self._end)

    def end(self, out: list[bytes], usage: UsageTotal, **more: Any) -> None:
        """Writes the last events. more: members of the one with the usage."""
        if self._include_usage:
            out.append(event(msgspec.structs.replace(self._chunk, usage=usage.info(), **more)))
        out.append(DONE)

    def error(self, out: list[bytes], error: ApiError) -> None:
        """Writes the last events of a stream that fails."""
        out += (event(error.body()), DONE)
