"""Waiting for what was launched."""

from __future__ import annotations

import torch


def wait_for(event: torch.cuda.Event) -> None:
    """Waits for an event, on any thread. Every thread begins on the first device: to wait there for another device's
    event would make a context on it, with hundreds of megabytes."""
    with torch.cuda.device(event.device):
        event.synchronize()
