"""Which memory the host may look at."""

from __future__ import annotations

import torch


def is_shared(device: torch.device) -> bool:
    """Whether the device's memory is the host's own, and what was launched is done: reading it waits for nobody."""
    return device.type == "cpu"
