"""Steps that the stages of a pipeline receive before the leader executes them."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from pagewire.services.executor.ranks.ahead import Ahead
from pagewire.services.executor.ranks.leader import Leader
from pagewire.services.executor.service.session import Session
from pagewire.services.executor.service.work import Called, Closed, Item, Opened, Submitted
from pagewire.services.executor.step.step import Step
from pagewire.v1.rank_link_pb2 import RankCommand


class Received:
    """A stand-in for the leader: notes what it sends to the other ranks."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def send(self, command: RankCommand) -> None:
        kind = command.WhichOneof("command")
        assert kind is not None
        self.commands.append(f"step {command.step.step_id}" if kind == "step" else kind)


def session() -> Session:
    return Session(lambda result: None)


def submitted(of: Session, step_id: int) -> Submitted:
    none = np.empty(0, dtype=np.int64)
    return Submitted(of, Step(step_id, [], none, none.reshape(0, 1), none.astype(np.int32)))


def make() -> tuple[Received, Ahead, SimpleQueue[Item]]:
    received = Received()
    return received, Ahead(cast(Leader, received)), SimpleQueue()


def test_a_step_is_sent_when_it_arrives() -> None:
    received, ahead, queue = make()
    one = session()
    for item in (Opened(one), submitted(one, 1), submitted(one, 2), Closed(one)):
        ahead.arrived(item, queue.put)
    assert received.commands == ["reset", "step 1", "step 2", "reset"] and queue.qsize() == 4


def test_steps_of_an_ended_stream_are_not_sent() -> None:
    received, ahead, queue = make()
    one, other = session(), session()
    for item in (Opened(one), Opened(other), submitted(one, 1), Closed(one), submitted(other, 1)):
        ahead.arrived(item, queue.put)
    assert received.commands == ["reset", "reset", "step 1"]


def test_items_behind_a_call_are_sent_in_their_turn() -> None:
    """The call has the others install weights, between the steps before and those behind it."""
    received, ahead, queue = make()
    one, other = session(), session()
    call = Called(lambda runner: received.commands.append("install"), "", None)
    items: list[Any] = [Opened(one), submitted(one, 1), call, submitted(one, 2), Opened(other), submitted(other, 1)]
    for item in items:
        ahead.arrived(item, queue.put)
    assert received.commands == ["reset", "step 1"]
    while not queue.empty():
        item = queue.get()
        ahead.begins(item)
        if isinstance(item, Called):
            item.function(cast(Any, None))
        ahead.ended(item)
    assert received.commands == ["reset", "step 1", "install", "reset", "step 1"]
    ahead.arrived(submitted(other, 2), queue.put)
    assert received.commands[-1] == "step 2"
