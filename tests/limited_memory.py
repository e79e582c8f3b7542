"""A limit on the memory that a test allocates."""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def address_space(more_bytes: int) -> Iterator[None]:
    """Whatever takes this much address space beyond what the process has fails within."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def python_peak(max_bytes: int) -> Iterator[None]:
    """Fails if Python objects and numpy arrays made within take more than this at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= max_bytes, f"{peak} bytes were allocated, {max_bytes} are allowed"
