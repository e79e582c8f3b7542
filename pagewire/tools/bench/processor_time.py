"""The processor time of a server, from Linux's files about processes."""

import os
import time
from pathlib import Path

_PROCESSES = Path("/proc")
# A server that takes less of a processor for this long has nothing to do.
_IDLE_SHARE, _IDLE_S = 0.1, 1.0


def processor_seconds(pid: int) -> float | None:
    """Returns the processor time that a process and its living descendants have taken; None if the system does not
    tell."""
    if not (_PROCESSES / str(pid) / "stat").exists():
        return None
    return sum(_ticks(one) for one in _tree(pid)) / os.sysconf("SC_CLK_TCK")


def await_idle(pid: int, most_s: float = 120.0) -> None:
    """Waits until a server does nothing: after its start, it records steps while no request comes, which would change
    what is measured. At most `most_s` seconds; no time if the system does not tell the processor time."""
    end, before = time.monotonic() + most_s, processor_seconds(pid)
    while before is not None and time.monotonic() < end:
        time.sleep(_IDLE_S)
        now = processor_seconds(pid)
        if now is None or now - before < _IDLE_SHARE * _IDLE_S:
            return
        before = now


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for children in (_PROCESSES / str(parent) / "task").glob("*/children"):
            found += map(int, _text(children).split())
    return found


def _ticks(pid: int) -> int:
    """Returns the ticks in user and in system mode; 0 for a process that has ended."""
    # The name, in parentheses, may hold anything.
    fields = _text(_PROCESSES / str(pid) / "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if fields else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""
