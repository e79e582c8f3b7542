"""Gives memory back to the system once large requests are over."""

import asyncio
import gc

from pagewire.process.process import release_unused_memory

# From this many bytes or characters of a request on, it is worth the time.
LARGE = 256 * 1024
_QUIET_S = 1.0
_AT_LATEST_S = 30.0  # after the first large request, if large requests follow without a pause

_timer: asyncio.TimerHandle | None = None
_latest = 0.0  # while there is a timer: when it acts at the latest, by the event loop's clock


def return_memory_after(size: int) -> None:
    """Returns memory to the system after a request of this many bytes. Call it on the event loop when a request ends.

    It acts a second after the last large request, and every half minute while large requests continue. Exceptions refer
    to refused requests in cycles until the garbage collector runs, and the C library keeps freed memory.
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
