"""Blocks of groups of every kind, and drafts behind blocks that were loaded."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewire.config import ExecutorConfig
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.step import Blocks, NewRequest
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.loads import Load, Loaded
from pagewire.services.executor.tiers.runner import TieredRunner, TieredStep
from pagewire.services.executor.tiers.start import with_tiers
from tests.services.executor.helpers.stepping import BLOCK_SIZE, CPU, GREEDY, LIMITS, tiny_llama
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.tiers.tiered_service import hashes_of

NUM_BLOCKS, FIRST, SECOND = 32, [4, 2, 9, 1, 17, 18], [5, 6, 7, 8, 10, 11]
TOKENS = np.random.default_rng(1).integers(3, 60, 29).tolist()
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("Gemma2", {"sliding_window": 12, "num_hidden_layers": 4, "head_dim": 8}),
    "states": ("Mamba2", {"num_heads": 12, "head_dim": 8, "state_size": 16, "n_groups": 1}),
}


class Steps:
    """Steps of one request at a time through a runner with tiers."""

    def __init__(self, runner: ModelRunner, **flags: Any) -> None:
        self.runner: TieredRunner = with_tiers(ExecutorConfig(**flags), runner)
        self.runner.tiers.open("f" * 64)
        self._groups, self.caches = len(runner.kv_groups), runner.kv_caches

    def run(self, **columns: Any) -> np.ndarray:
        """Executes a step; returns the tokens that it yields."""
        nothing: dict[str, Any] = {
            "step_id": 1,
            "request_ids": [],
            "num_scheduled_tokens": np.empty(0, dtype=np.int64),
            "num_new_blocks": np.empty((0, self._groups), dtype=np.int64),
            "new_block_ids": np.empty(0, dtype=np.int32),
        }
        return self.runner.execute(TieredStep(**(nothing | columns))).wait().token_ids

    def generate(
        self, ids: list[int], computed: int, num_tokens: int, num_drafts: int = 0, **columns: Any
    ) -> list[int]:
        """Returns the tokens behind the prompt, of which `computed` are in its blocks."""
        blocks = [Blocks(0, np.array(ids, dtype=np.int32))] * self._groups
        request = NewRequest(1, np.array(TOKENS, dtype=np.int32), len(TOKENS), computed, blocks, GREEDY)
        none = {"request_ids": [1], "num_new_blocks": np.zeros((1, self._groups), dtype=np.int64)}
        prompt = {"new_requests": [request], "num_scheduled_tokens": np.array([len(TOKENS) - computed])}
        tokens = self.run(**none, **prompt, **columns).tolist()
        drafts = {"num_draft_tokens": np.array([num_drafts])} if num_drafts else {}
        self.num_steps = 0
        while len(tokens) < num_tokens:
            tokens += self.run(**none, num_scheduled_tokens=np.array([1 + num_drafts]), **drafts).tolist()
            self.num_steps += 1
        self.run(finished_request_ids=[1])
        return tokens[:num_tokens]

    def load(self, blocks: list[tuple[Key, int]]) -> Loaded:
        ended, reports = threading.Event(), list[Loaded]()

        def report(loaded: Loaded) -> None:
            reports.append(loaded)
            ended.set()

        self.run(loads=[Load(1, blocks, report)])
        assert ended.wait(20)
        return reports[0]

    def full(self, ids: list[int]) -> list[tuple[Key, int]]:
        """Returns the three full blocks of the prompt in each group."""
        hashes = hashes_of(TOKENS)
        return [
            ((group, digest), block)
            for group in range(self._groups)
            for digest, block in zip(hashes, ids, strict=False)
        ]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("flag", ["kv_offloading_size", "kv_offloading_dir"])
def test_blocks_of_windows_and_states(tmp_path: Path, kind: str, flag: str) -> None:
    family, config = MODELS[kind]
    save_tiny(tmp_path, family, **config, max_position_embeddings=96)
    limits = replace(LIMITS, state_tokens=BLOCK_SIZE)
    value = 0.001 if flag == "kv_offloading_size" else str(tmp_path / "kv")
    steps = Steps(assemble(load(tmp_path), limits, NUM_BLOCKS, CPU), **{flag: value})
    expected = steps.generate(FIRST, 0, 12, saves=steps.full(FIRST))
    steps.runner.tiers.saves.wait(None, 10)
    steps.runner.reset()
    for cache in steps.caches:
        cache.fill_(float("nan"))  # what is not loaded would show
    assert steps.runner.tiers.disk is None or steps.runner.tiers.disk.wait_open(10)
    assert steps.load(steps.full(SECOND)).missing == []
    assert steps.generate(SECOND, 24, 12) == expected
    steps.runner.tiers.close()


def test_a_drafting_model_computes_what_was_loaded_for_the_target(tmp_path: Path) -> None:
    model, twin = tiny_llama(tmp_path / "target"), tiny_llama(tmp_path / "twin")
    proposer: Proposer = DraftModel(Target(model, LIMITS, NUM_BLOCKS, CPU), twin, 3, LIMITS.max_model_len)
    steps = Steps(assemble(model, LIMITS, NUM_BLOCKS, CPU, proposer=proposer), kv_offloading_size=0.001)
    expected = steps.generate(FIRST, 0, 12, num_drafts=3, saves=steps.full(FIRST))
    num_steps = steps.num_steps
    steps.runner.tiers.saves.wait(None, 10)
    TOKENS.reverse()  # other tokens, of which the drafting model knows in the blocks that are loaded next
    try:
        steps.generate(SECOND, 0, 12, num_drafts=3)
    finally:
        TOKENS.reverse()
    assert steps.load(steps.full(SECOND)).missing == []
    assert steps.generate(SECOND, 24, 12, num_drafts=3) == expected
    assert steps.num_steps == num_steps, "its drafts are as right as before"
    steps.runner.tiers.close()
