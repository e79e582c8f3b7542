"""Gives memory back to the system once large requests are over."""

import asyncio
import gc

from pagewire.process import release_unused_memory

# Bytes, or characters, of a request after which it is worth it.
LARGE = 256 * 1024
_QUIET_S = 1.0

_timer: asyncio.TimerHandle | None = None


def return_memory_after(size: int) -> None:
    """To be called on the event loop when a request of so many bytes is over; acts a second after the last large one.

    What refused a request refers to it, in circles, until somebody collects them; and the C library keeps what is
    freed.
    """
    global _timer
    if size < LARGE:
        return
    if _timer is not None:
        _timer.cancel()
    _timer = asyncio.get_running_loop().call_later(_QUIET_S, _return_memory)


def _return_memory() -> None:
    global _timer
    _timer = None
    gc.collect()
    asyncio.get_running_loop().run_in_executor(None, release_unused_memory)
