"""A leader and followers that do nothing but say how they are."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.config import ExecutorConfig
from pagewire.services.executor.parallel.group import RankLost
from pagewire.services.executor.ranks import leader as leaders
from pagewire.services.executor.ranks import member
from pagewire.services.executor.ranks.formation import common_flags
from pagewire.services.executor.ranks.leader import Leader
from pagewire.services.executor.ranks.link import Link, connect, introduce
from pagewire.v1.admin_pb2 import RankState, ServiceStatus
from pagewire.v1.executor_pb2 import ForgetBlocksRequest
from pagewire.v1.rank_link_pb2 import RankCommand, RankReport


class Group:
    def __init__(self, directory: Path) -> None:
        self.config = ExecutorConfig(
            device="cpu",
            tensor_parallel_size=3,
            distributed_executor_backend="external",
            leader=f"unix:{directory}/leader.sock",
        )
        self.lost: list[RankLost] = []
        self.is_lost = threading.Event()
        self.leader = Leader(self.config, self._on_lost)
        self.leader.start()
        self.followers: list[Link] = []

    def _on_lost(self, error: RankLost) -> None:
        self.lost.append(error)
        self.is_lost.set()

    def join(self, rank: int) -> None:
        link = connect(self.config.leader, threading.Event())
        introduce(link, "", rank, common_flags(self.config))
        self.followers.append(link)

    @property
    def states(self) -> list[RankState]:
        status = ServiceStatus()
        self.leader.describe(status, False)
        assert [rank.rank for rank in status.executor.ranks] == [0, 1, 2]
        return [rank.state for rank in status.executor.ranks]


STARTING, READY, LOST = RankState.RANK_STATE_STARTING, RankState.RANK_STATE_READY, RankState.RANK_STATE_LOST


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    for module in (leaders, member):
        monkeypatch.setattr(module, "REFUSAL_S", 0.2)
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        group = Group(Path(directory))
        assert group.states == [STARTING] * 3
        group.join(1)
        group.join(2)
        group.leader.gather()
        for link in group.followers:
            link.send(RankReport(ready=True))
        group.leader.wait_ready()
        yield group
        group.leader.stop()
        for link in group.followers:
            link.close()


def test_a_step_that_no_rank_can_execute_is_over(group: Group) -> None:
    for _ in range(2):
        for link in group.followers:
            link.send(RankReport(refused="ValueError: wrong"))
        group.leader.all_refuse("ValueError: wrong")
    assert group.states == [READY] * 3 and not group.lost


def test_the_group_ends_if_the_leader_cannot_do_what_another_can(group: Group) -> None:
    group.followers[0].send(RankReport(refused="ValueError: wrong"))
    with pytest.raises(RankLost, match="rank 0 of the executor failed, and rank 2 did not: ValueError: wrong") as lost:
        group.leader.all_refuse("ValueError: wrong")
    assert lost.value.in_a_step


def test_the_group_ends_if_a_follower_cannot_do_what_the_leader_has_begun(group: Group) -> None:
    group.followers[1].send(RankReport(refused="ValueError: wrong"))
    while not group.is_lost.wait(0.1):
        group.followers[1].send(RankReport(alive=True))
    (lost,) = group.lost
    assert lost.in_a_step and "rank 2 of the executor" in str(lost) and "failed: ValueError: wrong" in str(lost)
    assert group.states == [READY, READY, LOST]
    with pytest.raises(RankLost):
        group.leader.failure.check()


def test_blocks_are_forgotten_once_all_ranks_say_so(group: Group) -> None:
    """An answer that comes late, or says that it failed, does not count for a later order."""
    first, second = group.followers
    request = ForgetBlocksRequest(reset_at=1)
    assert not group.leader.forget(request, 0.01), "none has answered"
    for link, has_forgotten in ((first, True), (second, False), (first, True), (second, True)):
        link.send(RankReport(has_forgotten=has_forgotten))
    assert group.leader.forget(request, 20)
    for link in (first, second, first):
        link.send(RankReport(has_forgotten=link is first))
    assert not group.leader.forget(request, 20)
    second.send(RankReport(has_forgotten=True))
    assert group.leader.forget(request, 20)
    for link in group.followers:
        commands = [link.receive(RankCommand).forget_blocks for _ in range(4)]
        assert commands == [request] * 4
