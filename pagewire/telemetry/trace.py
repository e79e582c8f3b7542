"""The trace that a request belongs to, as it travels: W3C's trace context and baggage."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from pagewire.v1.common_pb2 import RequestContext

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_PRINTABLE = re.compile(r"[ -~]*")
# Longer ones are dropped, as the specifications allow.
_MAX_STATE, _MAX_BAGGAGE = 512, 8192


class Trace(NamedTuple):
    """Of the span that is the parent of what comes next; empty strings: there is none."""

    traceparent: str = ""
    tracestate: str = ""
    baggage: str = ""

    @classmethod
    def of(cls, context: RequestContext) -> "Trace":
        return cls(context.traceparent, context.tracestate, context.baggage)

    @classmethod
    def of_client(cls, headers: Iterable[tuple[str | bytes, str | bytes]]) -> "Trace":
        """Of HTTP headers in lower case, or of a call's metadata; what is not valid is left out."""
        told: dict[str, list[str]] = {}
        for name, value in headers:
            if name in _HEADERS:
                told.setdefault(_text(name), []).append(_text(value))
        if not told:
            return NO_TRACE
        parents = told.get("traceparent", [])
        parent = parents[0] if len(parents) == 1 and _TRACEPARENT.fullmatch(parents[0]) else ""
        # Both may be divided among several headers.
        state, baggage = (",".join(told.get(name, ())) for name in ("tracestate", "baggage"))
        return cls(parent, state if parent and _is_taken(state, _MAX_STATE) else "", _taken(baggage))

    def attach_to(self, context: RequestContext) -> RequestContext:
        """To the next service."""
        context.traceparent, context.tracestate, context.baggage = self
        return context

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What says the same in a single call."""
        return [(name, value) for name, value in zip(self._fields, self, strict=True) if value]

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; "" if there is none."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """Of the parent, 16 hexadecimal digits; "" if there is none."""
        return self.traceparent[36:52]


NO_TRACE = Trace()
_HEADERS = frozenset({*Trace._fields, *(name.encode() for name in Trace._fields)})


def _taken(baggage: str) -> str:
    return baggage if _is_taken(baggage, _MAX_BAGGAGE) else ""


def _is_taken(value: str, most: int) -> bool:
    return len(value) <= most and _PRINTABLE.fullmatch(value) is not None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
