"""Grammars of an executor: steps do not wait for what is compiled for requests to come."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from pagewire.services.executor.grammar import grammars
from pagewire.services.executor.grammar.grammars import Grammars
from pagewire.services.executor.step.step import NewRequest, Step
from pagewire.v1.common_pb2 import Grammar, SamplingParams
from tests.services.executor.helpers.constrained import EOS, VOCAB_SIZE
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

STUCK = Grammar(regex="stuck")


class Trial:
    """A process that tries grammars, and is stuck with one of them."""

    def __init__(self, *_: Any) -> None:
        self.tried: list[Grammar] = []
        self.is_stuck, self.may_go_on = threading.Event(), threading.Event()

    def call(self, name: str, args: tuple[bytes, ...], timeout: float) -> None:
        if name == "check":
            self.tried.append(Grammar.FromString(args[0]))
            if self.tried[-1] == STUCK:
                self.is_stuck.set()
                self.may_go_on.wait()

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
