"""The KV cache of a drafting model: separate memory with the blocks of the target's cache, and how far it is filled.

Each block of the target has a counterpart with the same id, in which the other model keeps the same tokens. So the
scheduler, which allocates, shares and frees blocks, need not know about it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device import memory
from pagewire.services.executor.layers.kv_spec import CacheSpec, StateSpec
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.step.limits import Limits


def places(drafter: Model, target: Model) -> list[int]:
    """Returns, for each caching layer of the drafter, the group of the target with the same blocks: a group that keeps
    the same number of tokens, or all. Raises StartupError if there is none."""
    specs = list(kv_cache.groups(target))
    return [_place(layer.kv_spec(), specs, drafter, target) for layer in drafter.caching_layers]


def _place(spec: CacheSpec, specs: list[CacheSpec], drafter: Model, target: Model) -> int:
    windows = [None if isinstance(other, StateSpec) else other.window for other in specs]
    wanted = () if isinstance(spec, StateSpec) else (spec.window, 0)
    found = next((windows.index(window) for window in wanted if window in windows), None)
    if found is None:
        raise StartupError(
            f"--speculative-config: {drafter.config.architecture} cannot draft for {target.config.architecture}: one "
            "keeps something of tokens that the other forgets; use another model, or method ngram"
        )
    return found


def _sizes(target: Model, num_blocks: int, limits: Limits) -> list[int]:
    """Returns the blocks of each group plus one, which takes writes that belong to no request."""
    return [group.num_blocks + 1 for group in kv_cache.kv_groups(target, num_blocks, limits)]


def num_bytes(drafter: Model, target: Model, num_blocks: int, limits: Limits) -> int:
    """Returns the bytes of the whole cache; num_blocks as in `kv_cache.kv_groups` of the target."""
    sizes = _sizes(target, num_blocks, limits)
    return sum(
        sizes[group] * layer.kv_spec().page_bytes(limits.block_size)
        for group, layer in zip(places(drafter, target), drafter.caching_layers, strict=True)
    )


def allocate(drafter: Model, target: Model, num_blocks: int, limits: Limits, device: torch.device) -> list[Tensor]:
    """Binds every layer of the drafter to its own cache, [num_blocks of the group + 1, *page_shape]."""
    sizes = _sizes(target, num_blocks, limits)
    caches = []
    for group, layer in zip(places(drafter, target), drafter.caching_layers, strict=True):
        spec = layer.kv_spec()
        shape = (sizes[group], *spec.page_shape(limits.block_size))
        cache = kv_cache.zeros(sizes[group] * spec.page_bytes(limits.block_size), device).view(spec.dtype).view(shape)
        layer.bind(cache, group, limits.block_size)
        caches.append(cache)
    return caches


class Filled:
    """Lower bounds of the tokens that the drafter has computed, by row and by block."""

    def __init__(self, max_num_seqs: int, num_blocks: int, group: int, block_size: int) -> None:
        """num_blocks: blocks of the observed group, if the host can read the block tables."""
        self.rows = np.zeros(max_num_seqs, dtype=np.int64)
        self._admissions = np.zeros(max_num_seqs, dtype=np.int64)
        self._kept = np.zeros(max_num_seqs, dtype=np.int64)  # by row: tokens that are recorded in blocks
        self._blocks = np.zeros(num_blocks, dtype=np.int64)
        self._group = group
        self._block_size = block_size

    def admit(self, rows: np.ndarray, state: RequestState, block_tables: BlockTables) -> None:
        """Starts rows of new requests with the tokens that their blocks hold."""
        admissions = state.admissions(rows)
        for index in np.flatnonzero(admissions != self._admissions[rows]).tolist():
            row = rows[index]
            num_computed = int(state.num_computed_tokens[row])
            self._admissions[row] = admissions[index]
            self.rows[row] = num_computed
            if memory.is_shared(block_tables.tensor.device):
                blocks = block_tables.tensor[self._group, row].numpy()
                first_own = -(-num_computed // self._block_size)
                self._blocks[blocks[first_own : block_tables.num_blocks[row, self._group]]] = 0
                held = self._blocks[blocks[:first_own]]
                gaps = np.flatnonzero(held < self._block_size)
                if len(gaps):
                    self.rows[row] = min(num_computed, int(gaps[0]) * self._block_size + int(held[gaps[0]]))
            self._kept[row] = self.rows[row]

    def take(self, new_block_ids: np.ndarray) -> None:
        """Records that these blocks of the group were given to requests that will fill them."""
        self._blocks[new_block_ids] = 0

    def fill(self, row: int, end: int, num_known: int, block_tables: BlockTables) -> None:
        """Records that the row's first `end` tokens are computed, num_known of which are no drafts; its block table
        covers them."""
        self.rows[row] = end
        start, end = int(self._kept[row]), min(end, num_known)
        if end > start and memory.is_shared(block_tables.tensor.device):
            size = self._block_size
            blocks = block_tables.tensor[self._group, row, start // size : -(-end // size)].numpy()
            self._blocks[blocks[:-1]] = size
            self._blocks[blocks[-1]] = end - (end - 1) // size * size
            self._kept[row] = end
