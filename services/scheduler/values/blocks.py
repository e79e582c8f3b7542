"""Blocks of the KV cache, and those that a request holds."""


class Block:
    """One block; a node of the free queue while nobody holds it."""

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
