"""The tiers from which saved blocks are read."""

from typing import NamedTuple

from pagewire.services.scheduler.tiers.contents import TierContents
from pagewire.v1.executor_pb2 import KVTierKind


class Source(NamedTuple):
    """The tiers of an executor. Its address is empty if it is the one that loads."""

    address: str
    contents: TierContents

    def has(self, group: int, block_hash: bytes) -> bool:
        """Returns whether a block can be loaded. Another executor finishes the saves that were ordered before it
        sends what they save, so these count."""
        if self.contents.has(group, block_hash):
            return True
        return bool(self.address) and self.contents.is_expected(group, block_hash)

    def kind_of(self, group: int, block_hash: bytes) -> int:
        """Returns the kind of tier as which a load counts."""
        if self.address:
            return KVTierKind.KV_TIER_KIND_HOST
        return self.contents.kind_of(group, block_hash) or 0
