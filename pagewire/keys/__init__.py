"""Who may come in: API keys, the limits of each, and whose request the present one is.

Gateway, tokenizer and scheduler have the same door before what clients reach; what the services say to each other does
not pass it.
"""

from contextvars import ContextVar

from pagewire.keys.door import Door
from pagewire.keys.entry import Key
from pagewire.v1.common_pb2 import RequestContext

__all__ = ["Door", "Key", "caller", "name_caller"]

# Whose key came with the present request; None: no key was asked for, or no client waits for it.
caller: ContextVar[Key | None] = ContextVar("caller", default=None)


def name_caller(context: RequestContext) -> None:
    """The tenant of a request is the name of the key that came with it."""
    if (key := caller.get()) is not None:
        context.tenant, context.tenant_weight = key.name, key.weight
