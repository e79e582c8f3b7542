"""Threads that give way to steps."""

from __future__ import annotations

import os
import threading

_NICENESS = 10


def step_back() -> None:
    """Lowers the priority of the calling thread and of threads that it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
