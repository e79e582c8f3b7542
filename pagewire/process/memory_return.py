"""Gives memory back to the system once large requests are over."""

import asyncio
import gc

from pagewire.process.process import release_unused_memory

# Bytes, or characters, of a request after which it is worth it.
LARGE = 256 * 1024
_QUIET_S = 1.0
_AT_LATEST_S = 30.0  # after the first, where large ones go on without a pause

_timer: asyncio.TimerHandle | None = None
_latest = 0.0  # while there is a timer: when it acts at the latest, by the event loop's clock


def return_memory_after(size: int) -> None:
    """To be called on the event loop when a request of so many bytes is over; acts a second after the last large one,
    and while they go on every half minute.

    What refused a request refers to it, in circles, until somebody collects them; and the C library keeps what is
    freed.
    """
    global _timer, _latest
    if size < LARGE:
        return
    loop = asyncio.get_running_loop()
    if _timer is None:
        _latest = loop.time() + _AT_LATEST_S
    else:
        _timer.cancel()
    _timer = loop.call_at(min(loop.time() + _QUIET_S, _latest), _return_memory)


def _return_memory() -> None:
    global _timer
    _timer = None
    gc.collect()
    asyncio.get_running_loop().run_in_executor(None, release_unused_memory)
