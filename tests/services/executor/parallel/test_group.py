"""Agreement of ranks, and the loss of one."""

import threading

import pytest

from pagewire.errors import StartupError
from pagewire.services.executor.parallel.group import ALONE_GROUP, Failure, Group, RankLost
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from tests.kernels.cpu.test_collectives import on_ranks


def make_groups(size: int) -> list[Group]:
    memory = SharedMemory([size, size])
    failure = Failure(memory)
    return [
        Group(rank, size, world=memory.channel(0, rank), loading=memory.channel(1, rank), failure=failure)
        for rank in range(size)
    ]


def test_what_all_have_is_known_to_all():
    groups = make_groups(3)
    assert on_ranks(3, lambda rank: groups[rank].of_all(2**40 - rank)) == [[2**40, 2**40 - 1, 2**40 - 2]] * 3
    assert on_ranks(3, lambda rank: groups[rank].least(7 + rank)) == [7] * 3
    assert ALONE_GROUP.of_all(5) == [5]


def test_a_rank_that_differs_is_named():
    groups = make_groups(3)
    assert on_ranks(3, lambda rank: groups[rank].check_same("weights", "a")) == [None] * 3

    def differ(rank: int) -> None:
        with pytest.raises(StartupError, match="rank 2 has other weights than rank 0"):
            groups[rank].check_same("weights", "ab"[rank == 2])

    on_ranks(3, differ)


def test_an_error_of_one_is_an_error_of_all():
    groups = make_groups(2)

    def fail(rank: int) -> str:
        with pytest.raises((OSError, StartupError)) as raised:
            groups[rank].without_error(OSError("no such file") if rank == 1 else None)
        return str(raised.value)

    assert on_ranks(2, fail) == ["rank 1 of the executor cannot read them; see its log", "no such file"]


def test_a_rank_that_waits_for_a_lost_one_raises_the_reason():
    waiting, other = make_groups(2)
    threading.Timer(0.05, other.failure.set, ["rank 1 has ended"]).start()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        waiting.least(3)
    assert not other.failure.set("another reason")
    with pytest.raises(RankLost, match="rank 1 has ended"):
        other.check()
