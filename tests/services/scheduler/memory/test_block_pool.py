"""Blocks: the order of eviction, the cached blocks, and the integrity check."""

import pytest

from pagewire.services.scheduler.memory.block_pool import BlockPool
from pagewire.services.scheduler.placement.integrity import check_pool
from pagewire.services.scheduler.values.block_hashes import ROOT_HASH, hash_block, root_hash
from pagewire.services.scheduler.values.blocks import Block


def allocate(pool: BlockPool, count: int) -> list[Block]:
    return [pool.allocate() for _ in range(count)]


def fill(pool: BlockPool, tokens: list[int]) -> list[Block]:
    """One block per token, hashed as a chain."""
    blocks, parent = allocate(pool, len(tokens)), ROOT_HASH
    for block, token in zip(blocks, tokens, strict=True):
        parent = hash_block(parent, [token])
        pool.register(block, parent)
    return blocks


def test_hash_depends_on_everything_before() -> None:
    a, b = hash_block(ROOT_HASH, [1, 2]), hash_block(ROOT_HASH, [1, 3])
    assert hash_block(a, [5]) != hash_block(b, [5])
    assert hash_block(a, [5]) == hash_block(hash_block(ROOT_HASH, [1, 2]), [5])
    assert hash_block(a, [5], b"adapter") != hash_block(a, [5])


def test_chains_with_a_salt_are_others() -> None:
    roots = {salt: root_hash(salt) for salt in ("", "a", "b")}
    assert roots[""] == ROOT_HASH and len({*roots.values()}) == 3
    # "aaaa" has the bytes of token 0x61616161: a request with it as a salt is not behind it as a token.
    assert root_hash("aaaa") != hash_block(ROOT_HASH, [0x61616161])


def test_no_salt_leads_to_the_chains_of_another_owner() -> None:
    names = ("", "a", "b", "ab")
    roots = {root_hash(salt, owner) for salt in names for owner in names}
    assert len(roots) == len(names) ** 2


def test_freed_contents_are_found_until_reused() -> None:
    pool = BlockPool(3)
    (block,) = fill(pool, [1])
    found = block.block_hash
    assert found is not None
    pool.release([block])
    assert pool.num_free_blocks == 3 and pool.find(found) is block
    pool.acquire(block)
    assert pool.num_free_blocks == 2
    pool.release([block])
    allocate(pool, 3)
    assert pool.find(found) is None
    check_pool(pool)


def test_least_recently_freed_is_evicted_first_and_tails_before_prefixes() -> None:
    pool = BlockPool(6)
    first, second = fill(pool, [1, 2, 3]), fill(pool, [11, 12, 13])
    pool.release(second)
    pool.release(first)
    assert allocate(pool, 6) == [*reversed(second), *reversed(first)]


def test_blocks_without_contents_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, blank = fill(pool, [1, 2]), allocate(pool, 2)
    pool.release(cached)
    pool.release(blank)
    assert set(allocate(pool, 2)) == set(blank)
    check_pool(pool)


def test_a_hit_keeps_a_shared_block_until_its_last_holder_leaves() -> None:
    pool = BlockPool(2)
    (block,) = fill(pool, [1])
    pool.acquire(block)
    pool.release([block])
    assert pool.num_free_blocks == 1
    pool.release([block])
    assert pool.num_free_blocks == 2


def test_equal_contents_are_indexed_once() -> None:
    pool = BlockPool(2)
    (first,), (second,) = fill(pool, [1]), fill(pool, [1])
    assert second.block_hash is None
    pool.release([second, first])
    check_pool(pool)
    assert allocate(pool, 1) == [second]


def test_integrity_notices_a_double_release() -> None:
    pool = BlockPool(2)
    blocks = allocate(pool, 1)
    pool.release(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        check_pool(pool)
