"""Chunks: the events of a streamed chat or text completion."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.encoding import DONE, encode, event
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.schema.generation import StreamOptions


class ChunkWriter:
    """The events of one streamed completion. What they share is encoded once: per token only the choice is."""

    def __init__(self, chunk: Body, options: StreamOptions | None) -> None:
        """chunk: without choices; what all the events have in common."""
        # One more event with the usage at the end, and `usage: null` in the others.
        self._include_usage = bool(options and options.include_usage)
        # The usage up to there instead of null.
        self._continuous_usage = bool(options and options.include_usage and options.continuous_usage_stats)
        self._chunk = msgspec.structs.replace(chunk, usage=None) if self._include_usage else chunk
        self._framed_for: str | None = None  # the version of weights that these two say
        self._head, self._end = self._frame(None)

    def _frame(self, version: str | None) -> tuple[bytes, bytes]:
        """What stands before and behind a choice."""
        self._framed_for = version
        self._chunk = msgspec.structs.replace(self._chunk, system_fingerprint=version)
        # No string holds the separator: its quotes would be escaped there.
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
        """usage: up to here; extra: further fields of this chunk; version: of the weights that make the choice."""
        if version and version != self._framed_for:
            self._head, self._end = self._frame(version)
        if extra or self._continuous_usage:
            fields = {"usage": usage.info()} if self._continuous_usage else {}
            out.append(event(msgspec.structs.replace(self._chunk, choices=[choice], **fields, **(extra or {}))))
        else:
            out += (self._head, encode(choice), self._end)

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        """The last events."""
        if self._include_usage:
            out.append(event(msgspec.structs.replace(self._chunk, usage=usage.info())))
        out.append(DONE)

    def error(self, out: list[bytes], error: ApiError) -> None:
        """The last events instead."""
        out += (event(error.body()), DONE)
