"""The processor time of a server, from Linux's files about processes."""

import os
from pathlib import Path

_PROCESSES = Path("/proc")


def processor_seconds(pid: int) -> float | None:
    """Returns the processor time that a process and its living descendants have taken; None if the system does not
    tell."""
    if not (_PROCESSES / str(pid) / "stat").exists():
        return None
    return sum(_ticks(one) for one in _tree(pid)) / os.sysconf("SC_CLK_TCK")


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
