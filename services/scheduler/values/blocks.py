"""Blocks of the KV cache, and those that a request holds."""

from dataclasses import dataclass


class Block:
    """One block; a node of the free queue while no request holds it."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None


class HeldBlocks:
    """The blocks of one group that a request holds: its block table from `first` on."""

    __slots__ = ("blocks", "end", "first")

    def __init__(self, first: int, blocks: list[Block]) -> None:
        self.first = first
        self.blocks = blocks
        self.end = first + len(blocks)  # the length of the block table

    @property
    def ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix hit: those blocks of a request's first `num_tokens` tokens that are still read."""

    held: tuple[HeldBlocks, ...]  # by group; not held yet
    num_tokens: int


@dataclass(slots=True)  # not frozen, which would be slower to create
class NewBlocks:
    """Blocks appended to the tables of one request; not to be changed."""

    counts: list[int]  # by group
    ids: list[int]  # of all groups, [sum(counts)]


class RequestBlocks:
    """The blocks of one request, and the hashes under which they are found. Owned by the KVCacheManager of the replica
    that runs it."""

    __slots__ = (
        "awaited",
        "hashed_for",
        "hashes",
        "held",
        "num_cached",
        "num_slots",
        "num_tokens_to_cache",
        "other_hashes",
        "root_hash",
    )

    def __init__(self, root_hash: bytes) -> None:
        """root_hash: the first hash of the chain."""
        self.root_hash = root_hash
        self.hashes: list[bytes] = []
        self.hashed_for = ""  # the version of the weights
        self.other_hashes: dict[str, list[bytes]] = {}  # by version of the weights, during a replacement
        self.awaited: tuple[RequestBlocks, int] | None = None  # (blocks of another request, number to wait for)
        self.drop()

    def drop(self) -> None:
        """Forgets all held blocks."""
        self.held: tuple[HeldBlocks, ...] = ()  # by group
        self.num_slots = 0  # tokens for which all groups have blocks
        self.num_cached = 0  # leading blocks that are findable
        self.num_tokens_to_cache = 0  # computed tokens from which one more is findable

    def hide(self) -> None:
        """Keeps the held blocks, and those that the request adds to them, from becoming findable."""
        self.num_cached = self.num_tokens_to_cache = 1 << 62  # more than any request has

    def forget_hashes(self) -> None:
        """Drops the hashes, as the block size may have changed."""
        self.hashes.clear()
        self.other_hashes.clear()

    def await_none(self) -> None:
        """Stops waiting for blocks of another request."""
        self.awaited = None
