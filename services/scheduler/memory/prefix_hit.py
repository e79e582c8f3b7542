"""Prefix hits over several groups of layers."""

from collections.abc import Sequence

from pagewire.services.scheduler.memory.group_blocks import GroupBlocks


def longest_hit(groups: Sequence[GroupBlocks], hashes: Sequence[bytes], num_blocks: int) -> int:
    """Returns the largest number of leading blocks, up to `num_blocks`, after which all groups can continue."""
    # A group that keeps all tokens can continue any shorter prefix; windows and states must agree on one of them.
    windows = []
    for group in groups:
        if group.window:
            windows.append(group)
        else:
            num_blocks = group.longest_hit(hashes, num_blocks)
    before = num_blocks + 1
    while num_blocks != before:
        before = num_blocks
        for group in windows:
            num_blocks = group.longest_hit(hashes, num_blocks)
    return num_blocks
