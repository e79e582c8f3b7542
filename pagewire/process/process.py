"""The life of a service process, tied to the supervisor's, and its share of the machine."""

import ctypes
import math
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

from pagewire.process import cgroup

# Set by a supervisor for its children: its own process id.
PARENT_PID = "PAGEWIRE_PARENT_PID"
# And how the process ended that this one replaces, as an exit code or, negative, a signal.
PREDECESSOR = "PAGEWIRE_PREDECESSOR"
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_PR_SET_PDEATHSIG = 1
_MAX_DESCRIPTORS = 1 << 17


def predecessor_failed() -> bool:
    """Whether the process that this one replaces has ended by its own doing, as a supervisor has told. SIGKILL is
    somebody else's."""
    code = int(os.environ.get(PREDECESSOR, "0"))
    return code > 0 or -code in _FAULTS


def die_with_parent() -> None:
    """Ties this process's life to the supervisor's; nothing without a supervisor. Called first thing by a service."""
    parent = os.environ.pop(PARENT_PID, None)
    if parent is not None:
        die_with(int(parent))


def die_with(parent: int) -> None:
    """Ends this process as soon as its parent, whose process id is given, has ended, even by SIGKILL.

    Called in the main thread; the parent must have started this process from its own main thread, because Linux
    watches the thread.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), name="watch-parent", daemon=True).start()
    # The parent may have died before the call above.
    if os.getppid() != parent:
        os._exit(1)


def quiet_grpc() -> None:
    """Keeps gRPC from a line on standard error for each failed handshake, by which anybody could fill the log. Called
    before gRPC is imported; what the environment says of GRPC_VERBOSITY counts more."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def spare_grpc_threads() -> None:
    """Makes gRPC read its sockets in the thread that waits for its events, not in a separate pool of threads: a message
    then wakes half as many threads and takes two thirds of the processor time. Called before gRPC is imported; what
    the environment says of GRPC_EXPERIMENTS counts more.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def usable_cores() -> int:
    """Processors that this process may keep busy: those it may run on, and no more than its container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def raise_descriptor_limit() -> int:
    """The descriptors that this process may have open: as many as the system allows it, which is often more than it
    is given at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


def release_unused_memory() -> None:
    """Gives freed memory that the C library keeps for itself back to the system, where the library can do that.

    Worth it once, when a service has loaded what it serves; later freed memory is about to be used again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
