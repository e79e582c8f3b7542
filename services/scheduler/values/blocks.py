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
    """The blocks that a request holds of one group: those of its block table from `first` on."""

    __slots__ = ("blocks", "end", "first")

    def __init__(self, first: int, blocks: list[Block]) -> None:
        self.first = first
        self.blocks = blocks
        self.end = first + len(blocks)  # how far the block table reaches

    @property
    def ids(self) -> list[int]:
        return [block.block_id for block in self.blocks]


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A prefix hit: the blocks that are still read of the KV of a request's first num_tokens tokens."""

    held: tuple[HeldBlocks, ...]  # by group; not held yet
    num_tokens: int


@dataclass(slots=True)  # not frozen, as that would take longer to make
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
        """root_hash: what the hashes begin with."""
        self.root_hash = root_hash
        self.hashes: list[bytes] = []
        self.hashed_for = ""  # the version of the weights that they are for
        self.other_hashes: dict[str, list[bytes]] = {}  # for other weights by version, while these are replaced
        self.awaited: tuple[RequestBlocks, int] | None = None  # the blocks of a request that it waits for, and how many
        self.drop()

    def drop(self) -> None:
        """Forgets all held blocks."""
        self.held: tuple[HeldBlocks, ...] = ()  # by group
        self.num_slots = 0  # tokens that the block tables of all groups have room for
        self.num_cached = 0  # those in front, which can be found
        self.num_tokens_to_cache = 0  # computed tokens with which one more can be found

    def forget_hashes(self) -> None:
        """Drops the hashes, as blocks may be of another size from now on."""
        self.hashes.clear()
        self.other_hashes.clear()

    def await_none(self) -> None:
        """Stops waiting for blocks of another request."""
        self.awaited = None
