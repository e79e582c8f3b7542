"""A cache of image embeddings for later prompts with the same images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor


class EmbeddingCache:
    """Embeddings of images by a key of each image; the least recently used are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[Hashable, Tensor] = OrderedDict()

    def clear(self) -> None:
        self._entries.clear()
        self._num_bytes = 0

    def get(self, key: Hashable) -> Tensor | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: Hashable, embeddings: Tensor) -> None:
        """Adds embeddings that are not in the cache, unless they alone exceed its size."""
        if embeddings.nbytes > self._max_bytes:
            return
        self._entries[key] = embeddings
        self._num_bytes += embeddings.nbytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.nbytes
