"""Progress of a phase of the start."""

from __future__ import annotations

from collections.abc import Callable

# Receives the fraction done, 0 to 1, and what is being done.
Progress = Callable[[float, str], None]
