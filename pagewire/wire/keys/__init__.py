"""Who may come in: API keys, the limits of each, and whose request the present one is.

Gateway, tokenizer and scheduler have the same door before what clients reach; what the services say to each other does
not pass it.
"""

from contextvars import ContextVar

from pagewire.wire.keys.door import Door
from pagewire.wire.keys.entry import Key

__all__ = ["Door", "Key", "caller"]

# Whose key came with the present request; None: no key was asked for, or no client waits for it.
caller: ContextVar[Key | None] = ContextVar("caller", default=None)
