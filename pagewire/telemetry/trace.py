"""The trace of a request, as W3C's trace context and baggage."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from pagewire.v1.common_pb2 import RequestContext

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_PRINTABLE = re.compile(r"[ -~]*")
# Longer ones are dropped, as the specifications allow.
_MAX_STATE, _MAX_BAGGAGE = 512, 8192


class Trace(NamedTuple):
    """The context of the parent span; empty strings without a parent."""

    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""

    @classmethod
    def of(cls, context: RequestContext) -> "Trace":
        return cls(context.traceparent, context.tracestate, context.baggage)

    @classmethod
    def of_client(cls, headers: Iterable[tuple[str | bytes, str | bytes]]) -> "Trace":
        """Returns the trace in HTTP headers, in lower case, or in metadata of a call; invalid parts are left out."""
        found: dict[str, list[str]] = {}
        for name, value in headers:
            if name in _HEADERS:
                found.setdefault(_text(name), []).append(_text(value))
        if not found:
            return NO_TRACE
        parents = found.get("traceparent", [])
        parent = parents[0] if len(parents) == 1 and _TRACEPARENT.fullmatch(parents[0]) else ""
        # Both may be split into several headers.
        state, baggage = (",".join(found.get(name, ())) for name in ("tracestate", "baggage"))
        return cls(parent, state if parent and _is_taken(state, _MAX_STATE) else "", _taken(baggage))

    def attach_to(self, context: RequestContext) -> RequestContext:
        """Writes the trace to the context of a request, for the next service, and returns the context."""
        context.traceparent, context.tracestate, context.baggage = self
        return context

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """The metadata that carries the trace in a single call."""
        return [(name, value) for name, value in zip(self._fields, self, strict=True) if value]

    @property
    def trace_id(self) -> str:
        """The id of the trace, 32 hexadecimal digits; "" if there is none."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """The id of the parent span, 16 hexadecimal digits; "" if there is none."""
        return self.traceparent[36:52]


NO_TRACE = Trace()
_HEADERS = frozenset({*Trace._fields, *(name.encode() for name in Trace._fields)})


def _taken(baggage: str) -> str:
    return baggage if _is_taken(baggage, _MAX_BAGGAGE) else ""


def _is_taken(value: str, most: int) -> bool:
    return len(value) <= most and _PRINTABLE.fullmatch(value) is not None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
