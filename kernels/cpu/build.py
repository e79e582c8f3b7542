"""Compile the C++ kernels once per machine and load them."""

from __future__ import annotations


class BuildError(RuntimeError):
    """The C++ kernels cannot be compiled or loaded here; the message names the cause and the remedy."""
