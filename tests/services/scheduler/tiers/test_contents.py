"""The index of what tiers hold."""

import pytest

from pagewire.services.scheduler.placement.prefix_index import IndexedBlocks, PrefixIndex
from pagewire.services.scheduler.tiers import contents as module
from pagewire.services.scheduler.tiers.contents import TierContents
from pagewire.v1.executor_pb2 import BlockHashes, KVTierKind, TierChanges

HOST, DISK = KVTierKind.KV_TIER_KIND_HOST, KVTierKind.KV_TIER_KIND_DISK
A, B = b"a" * 32, b"b" * 32


def changes(kind: int, stored: bytes = b"", removed: bytes = b"", group: int = 0, cleared: bool = False) -> TierChanges:
    return TierChanges(
        kind=kind,  # type: ignore[arg-type]
        cleared=cleared,
        stored=[BlockHashes(group=group, hashes=stored)],
        removed=[BlockHashes(group=group, hashes=removed)],
    )


def test_a_block_is_there_while_one_tier_has_it() -> None:
    index = PrefixIndex()
    contents = TierContents([HOST, DISK], 2, IndexedBlocks(index, 3))
    contents.apply(changes(HOST, A + B))
    contents.apply(changes(DISK, A))
    assert contents.kind_of(0, A) == HOST and contents.is_in_first(0, A) and not contents.has(1, A)
    contents.apply(changes(HOST, cleared=True))
    assert contents.kind_of(0, A) == DISK and not contents.is_in_first(0, A) and not contents.has(0, B)
    assert index.hashes_of(3) == {A}
    contents.apply(changes(DISK, removed=A))
    assert not contents.has(0, A) and len(index) == 0
    contents.apply(changes(DISK, A, group=7))
    contents.apply(changes(9, A))
    assert len(index) == 0, "what the executor did not describe is ignored"


def test_what_was_not_found_is_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    contents = TierContents([DISK], 1)
    contents.apply(changes(DISK, A + B))
    contents.doubt(0, A)
    now = 129.0
    contents.doubt(0, B)
    contents.trust_again()
    assert not contents.has(0, A) and not contents.has(0, B)
    now = 130.0
    contents.trust_again()
    assert contents.has(0, A) and not contents.has(0, B)
    contents.apply(changes(DISK, B))
    assert contents.has(0, B), "it was stored again"


def test_blocks_that_are_being_saved_are_expected_until_they_are_known() -> None:
    contents = TierContents([DISK], 1)
    contents.expect(0, A)
    contents.expect(0, B)
    assert contents.is_expected(0, A) and not contents.has(0, A)
    contents.apply(changes(DISK, A))
    assert not contents.is_expected(0, A) and contents.has(0, A)
    contents.doubt(0, B)
    assert not contents.is_expected(0, B)
