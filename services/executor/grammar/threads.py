"""Threads that compile and follow grammars."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

TRIAL_STACK = 4 * 2**20  # bytes, for the process that tries grammars


def grammar_thread(name: str) -> ThreadPoolExecutor:
    """Returns a pool of one thread with twice the stack on which grammars are tried."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_leave_the_starter)
    previous = threading.stack_size(8 * TRIAL_STACK)
    try:
        pool.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(previous)
    return pool


def _leave_the_starter() -> None:
    """Moves the calling thread to the processors of the process's first thread: one that the device thread starts would
    take the time of that."""
    if hasattr(os, "sched_setaffinity") and (cpus := os.sched_getaffinity(os.getpid())) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
