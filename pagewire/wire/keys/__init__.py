"""Who may come in: API keys, the limits of each, and whose request the present one is.

Gateway, tokenizer and scheduler have the same door before what clients reach; what the services say to each other does
not pass it.
"""

from contextvars import ContextVar

from pagewire.wire.keys.door import Door
from pagewire.wire.keys.entry import Key

__all__ = ["Door", "Key", "caller"]

# The key of the current request; None: no key is required, or no client waits for the request.
caller: ContextVar[Key | None] = ContextVar("caller", default=None)
