"""Grammars of an executor: steps do not wait for what is compiled for requests to come."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import REGISTRY

from pagewire.process.worker_process import WorkerDiedError, WorkerTooSlowError
from pagewire.services.executor.grammar import grammars
from pagewire.services.executor.grammar.errors import GrammarError, PassingGrammarError
from pagewire.services.executor.grammar.grammars import Grammars
from pagewire.services.executor.step.step import NewRequest, Step
from pagewire.v1.common_pb2 import Grammar, SamplingParams
from pagewire.wire.rpc import RpcError
from tests.services.executor.helpers.constrained import EOS, VOCAB_SIZE
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

STUCK, SLOW, DEADLY = Grammar(regex="stuck"), Grammar(regex="slow"), Grammar(regex="deadly")
LARGE = [Grammar(regex=f"large{i}" + "(long)?" * 50) for i in range(3)]
SMALL = Grammar(regex="small")


class Trial:
    """A process that tries grammars, and is stuck with one of them."""

    pid, is_alive = 1, True

    def __init__(self, *_: Any) -> None:
        self.tried: list[Grammar] = []
        self.is_stuck, self.may_go_on = threading.Event(), threading.Event()
        self.dies_in: list[str] = []  # the calls in which it is killed

    def call(self, name: str, args: tuple[bytes, ...], timeout: float) -> None:
        if name in self.dies_in:
            self.dies_in.remove(name)
            self.pid += 1
            raise WorkerDiedError
        if name == "check":
            self.tried.append(Grammar.FromString(args[0]))
            if self.tried[-1] == STUCK:
                self.is_stuck.set()
                self.may_go_on.wait()
            if self.tried[-1] == SLOW:
                raise WorkerTooSlowError
            if self.tried[-1] == DEADLY:
                raise WorkerDiedError

    def close(self) -> None:
        self.may_go_on.set()


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    trial = Trial()
    monkeypatch.setattr(grammars, "WorkerProcess", lambda *_: trial)
    yield trial
    trial.close()


def step_with(grammar: Grammar, num_requests: int) -> Step:
    """Returns a step in which requests with the grammar enter."""
    none = np.zeros(0, dtype=np.int64)
    params = SamplingParams(grammar=grammar)
    requests = [NewRequest(i, np.arange(5, dtype=np.int32), 5, 0, (), params) for i in range(num_requests)]
    return Step(1, (), none, none, none, new_requests=requests)


def counts() -> tuple[float, ...]:
    """Returns how many grammars were compiled, and how many were found compiled."""
    name = "pagewire:executor_grammars_total"
    return tuple(REGISTRY.get_sample_value(name, {"how": how}) or 0 for how in ("compiled", "cached"))


async def test_a_step_does_not_wait_for_a_grammar_that_is_tried(tmp_path: Path, trial: Trial) -> None:
    path = save_byte_level(tmp_path)
    kept = Grammars(lambda: path, VOCAB_SIZE, [EOS], timeout=5.0, cache_size=1)
    first, second = Grammar(regex="[ab]+"), Grammar(regex="[cd]+")
    for grammar in (first, second):
        await kept.check(grammar)
    stuck = asyncio.create_task(kept.check(STUCK))
    await asyncio.to_thread(trial.is_stuck.wait)
    before = counts()
    for _ in range(2):
        attached = await kept.attach(step_with(first, num_requests=4))
        assert not stuck.done() and all(request.matcher is not None for request in attached.new_requests)
    assert counts() == (before[0] + 1, before[1] + 7), "what a step needs is compiled once"
    trial.may_go_on.set()
    await stuck
    await kept.check(first)
    assert trial.tried == [first, second, STUCK], "a grammar is tried once"
    kept.close()


async def test_a_grammar_in_use_is_not_tried_again(
    tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MOST_TRIED", 2)
    path = save_byte_level(tmp_path)
    kept = Grammars(lambda: path, VOCAB_SIZE, [EOS], timeout=5.0, cache_size=1)
    used, *others = (Grammar(regex=f"[ab]{{{n}}}") for n in range(1, 5))
    for other in others:
        await kept.check(used)
        await kept.check(other)
    assert trial.tried == [used, *others]
    kept.close()


def grammars_at(path: Path) -> Grammars:
    save_byte_level(path)
    return Grammars(lambda: path, VOCAB_SIZE, (EOS,), timeout=5, cache_size=8)


async def test_small_grammars_come_first_and_those_without_a_request_not_at_all(tmp_path: Path, trial: Trial) -> None:
    """A client that sends many large grammars, and leaves, delays others by one of them at most."""
    compiling = grammars_at(tmp_path)
    first = asyncio.create_task(compiling.compile(STUCK))
    await asyncio.to_thread(trial.is_stuck.wait)
    stays, *leave = [asyncio.create_task(compiling.compile(grammar)) for grammar in LARGE]
    small = asyncio.create_task(compiling.compile(SMALL))
    await asyncio.sleep(0)  # all wait
    for task in leave:
        task.cancel()
    await asyncio.wait(leave)
    trial.may_go_on.set()
    await asyncio.gather(first, stays, small)
    assert trial.tried == [STUCK, SMALL, LARGE[0]]
    await compiling.compile(LARGE[1])  # as if it had never been asked for
    compiling.close()


async def test_a_request_that_leaves_takes_nothing_from_another_with_its_grammar(tmp_path: Path, trial: Trial) -> None:
    compiling = grammars_at(tmp_path)
    first = asyncio.create_task(compiling.compile(STUCK))
    await asyncio.to_thread(trial.is_stuck.wait)
    leaves, stays = (asyncio.create_task(compiling.compile(SMALL)) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait([leaves])
    trial.may_go_on.set()
    await asyncio.gather(first, stays)
    assert trial.tried == [STUCK, SMALL]
    compiling.close()


async def test_a_grammar_that_took_too_long_is_not_tried_again_at_once(tmp_path: Path, trial: Trial) -> None:
    compiling = grammars_at(tmp_path)
    for _ in range(3):
        with pytest.raises(PassingGrammarError, match="takes longer than 5 s"):
            await compiling.compile(SLOW)
    assert trial.tried == [SLOW]
    compiling.close()


@pytest.mark.parametrize("calls", [["started"], ["check"], ["started", "check"]])
async def test_a_killed_process_is_not_the_grammars_fault(tmp_path: Path, trial: Trial, calls: list[str]) -> None:
    compiling = grammars_at(tmp_path)
    trial.dies_in = calls
    await compiling.compile(SMALL)
    compiling.close()


async def test_a_grammar_that_ends_the_process_twice_is_refused_for_a_while(
    tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = grammars_at(tmp_path)
    for _ in range(2):
        with pytest.raises(GrammarError, match="too large or too deeply nested"):
            await compiling.compile(DEADLY)
    assert trial.tried == [DEADLY, DEADLY]
    monkeypatch.setattr(grammars.time, "monotonic", lambda: float("inf"))  # much later
    with pytest.raises(GrammarError):
        await compiling.compile(DEADLY)
    assert trial.tried == [DEADLY] * 4
    compiling.close()


async def test_a_process_that_does_not_start_refuses_no_grammar(tmp_path: Path, trial: Trial) -> None:
    compiling = grammars_at(tmp_path)
    trial.dies_in = ["started", "started"]
    with pytest.raises(RpcError, match="does not start") as raised:
        await compiling.check(SMALL)
    assert raised.value.code == grpc.StatusCode.UNAVAILABLE
    await compiling.check(SMALL)
    compiling.close()


async def test_what_an_output_could_not_follow_is_compiled_again_without_a_trial(tmp_path: Path, trial: Trial) -> None:
    """All outputs of a compiled grammar share its memory, so what one has filled must not stay for those to come."""
    compiling = grammars_at(tmp_path)
    (request,) = (await compiling.attach(step_with(SMALL, num_requests=1))).new_requests
    assert request.matcher is not None
    request.matcher.give_up("a token takes too long there")
    before = await compiling.compile(SMALL)
    await asyncio.sleep(0)
    assert await compiling.compile(SMALL) is not before
    assert trial.tried == [SMALL]  # steps would wait for another
    compiling.close()
