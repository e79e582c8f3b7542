"""API keys, their limits, and the key of the current request.

Gateway, tokenizer and scheduler have the same door for calls of clients; calls between services do not pass it.
"""

from contextvars import ContextVar

from pagewire.wire.keys.door import Door
from pagewire.wire.keys.entry import Key

__all__ = ["Door", "Key", "caller"]

# The key of the current request; None: no key is required, or no client waits for the request.
caller: ContextVar[Key | None] = ContextVar("caller", default=None)
