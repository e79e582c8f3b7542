"""The lifetime of a service process, which ends with its supervisor, and its share of the machine."""

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
# The exit code of the process that this one replaces, negative for a signal, and its id.
PREDECESSOR, PREDECESSOR_PID = "PAGEWIRE_PREDECESSOR", "PAGEWIRE_PREDECESSOR_PID"
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_PR_SET_PDEATHSIG = 1
_MAX_DESCRIPTORS = 1 << 17


def is_predecessor(pid: int) -> bool:
    """Returns whether a process is the one that this one replaces."""
    return os.environ.get(PREDECESSOR_PID) == str(pid)


def predecessor_failed() -> bool:
    """Returns whether the process that this one replaces failed by itself. SIGKILL comes from outside."""
    code = int(os.environ.get(PREDECESSOR, "0"))
    return code > 0 or -code in _FAULTS


def die_with_parent() -> None:
    """Makes this process end with its supervisor, if it has one. A service calls it first of all."""
    parent = os.environ.pop(PARENT_PID, None)
    if parent is not None:
        die_with(int(parent))


def die_with(parent: int) -> None:
    """Makes this process end as soon as its parent ends, even by SIGKILL. parent: the process id.

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
    """Stops gRPC from logging every failed handshake, with which any client could fill the log.

    Call it before gRPC is imported; GRPC_VERBOSITY in the environment takes precedence.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def spare_grpc_threads() -> None:
    """Makes gRPC read its sockets in the thread that waits for its events, not in a separate pool of threads: a message
    then wakes half as many threads and takes two thirds of the processor time. Call it before gRPC is imported;
    GRPC_EXPERIMENTS in the environment takes precedence.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def usable_cores() -> int:
    """Returns the number of processors that this process may keep busy: at most the CPU quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def raise_descriptor_limit() -> int:
    """Raises the limit of open descriptors as far as the system allows, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Returns the number of open descriptors of this process."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


def release_unused_memory() -> None:
    """Returns freed memory, which the C library keeps, to the system, if the library can do that.

    It pays off once a service has loaded its model; memory that is freed later is soon used again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
