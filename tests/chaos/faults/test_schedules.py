"""A short form of the schedules of `make chaos`, and that they would notice."""

from pathlib import Path

import pytest

from tests.chaos.answers import Received, difference
from tests.chaos.faults.catalogue import ALL
from tests.chaos.faults.chaos_line import fake_line, running
from tests.chaos.faults.play import Player
from tests.chaos.faults.schedule import Setting, draw
from tests.e2e.conftest import short_directory

SERVICES = ["gateway", "sister", "tokenizer", "scheduler", "executor0", "executor1"]
SETTING = Setting(SERVICES, ["a", "b", "c", "d", "e"], ["rare"], hang_timeout=2.0, has_disk=True, max_asks=5)
# Small ones of every kind.
REQUESTS = ["chat", "chat-n2-logprobs", "stop-hit", "completion-echo", "tool", "long-prompt"]


def test_a_seed_is_a_schedule() -> None:
    schedules = [draw(seed, SETTING) for seed in range(300)]
    assert schedules == [draw(seed, SETTING) for seed in range(300)]
    assert len({str(schedule) for schedule in schedules}) == 300


def test_schedules_have_all_there_is() -> None:
    faults = [fault for seed in range(300) for fault in draw(seed, SETTING).faults]
    kinds = {fault.kind for fault in faults}
    assert kinds == {"kill", "restart", "stop", "hang", "stutter", "cut", "refuse", "partition", "slow", "disk"}
    assert {target for fault in faults for target in fault.targets} == {*SERVICES}
    assert any(fault.kind == "kill" and len(fault.targets) > 1 for fault in faults)


def test_a_client_that_may_lose_a_gateway_retries() -> None:
    for schedule in (draw(seed, SETTING) for seed in range(300)):
        hits = any({"gateway", "sister"} & {*fault.targets} for fault in schedule.faults)
        assert not hits or all(ask.is_kept for ask in schedule.asks if ask.leaves_at is None)


def test_answers_are_equal_in_whatever_pieces_they_come() -> None:
    def received(*pieces: str) -> Received:
        received = Received()
        for piece in pieces:
            received.add({"id": str(pieces), "choices": [{"index": 0, "delta": {"content": piece}}]})
        return received

    assert difference(received("a", "bc").value, received("ab", "c").value) is None
    assert difference(received("a", "b", "b", "c").value, received("ab", "c").value) is not None
    assert difference(received("a", "c").value, received("ab", "c").value) is not None


async def test_streams_survive_some_schedules(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with short_directory() as name:
        async with running(fake_line(Path(name), smollm2_gguf)) as line:
            player = Player(line, "short", REQUESTS, 4, timeout=60)
            assert await player.learn() == []
            for seed in (2, 5, 11):
                assert (await player.play(draw(seed, player.setting))).problems == []
            # It would be noticed if an answer were another one.
            monkeypatch.setattr("tests.chaos.faults.play.ALL", dict.fromkeys(REQUESTS, ALL["stop-never"]))
            assert (await player.play(draw(2, player.setting))).problems
