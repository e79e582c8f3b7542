"""Adapters beside other features: ranks, drafts, weights that are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import ExecutorConfig
from pagewire.services.executor.adapters.host import HostAdapters
from pagewire.services.executor.adapters.loading import load_adapter
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.models.protocol import Model, OwnModel
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.step.step import SlotChange
from pagewire.v1.common_pb2 import Adapter, SamplingParams
from tests.services.executor.adapters.test_served import PROMPTS, changes, start, together
from tests.services.executor.helpers.adapters import merged, save_adapter, save_stacked
from tests.services.executor.helpers.staged import Staged, joined_runners
from tests.services.executor.helpers.stepping import CPU, GREEDY, LIMITS, SEEDED, Driver
from tests.services.executor.models.experts.test_experts import EXPERTS
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.service import test_replacement

NUM_TOKENS = 10


def slots_of(model: Model, path: Path) -> AdapterSlots:
    assert isinstance(model, OwnModel)
    slots = AdapterSlots(model, 2, 8, CPU, HostAdapters())
    adapter = load_adapter(slots, Adapter(name="a", path=str(path)))
    slots.host.keep(adapter)
    slots.host.give(Adapter(name="a", path=str(path), digest=adapter.digest))
    slots.allocate(with_experts=adapter.has_experts)
    return slots


@pytest.mark.parametrize(
    ("family", "tensor", "stages", "whole_experts"),
    [
        ("Llama", 2, 1, False),
        ("Llama", 1, 2, False),
        ("Qwen3Moe", 2, 1, False),
        ("Qwen3Moe", 2, 1, True),
        ("Qwen3Moe", 1, 2, False),
    ],
)
def test_ranks_have_the_tokens_of_one(
    tmp_path: Path, family: str, tensor: int, stages: int, whole_experts: bool
) -> None:
    base = tmp_path / "base"
    if family == "Llama":
        save_tiny(base, family)
        adapter = save_adapter(tmp_path / "a", base)
        changed = merged(tmp_path / "changed", base, adapter)
    else:
        save_tiny(base, family, **EXPERTS, head_dim=16)
        adapter, changed = save_stacked(tmp_path / "a", tmp_path / "changed", base), tmp_path / "changed"
    own, without = (together(start(path), (), [0] * 4) for path in (changed, base))
    runners = joined_runners(
        lambda group: load(base, tensor=group.tensor, stage=group.stage, whole_experts=whole_experts),
        tensor,
        stages,
        LIMITS,
        64,
        make_adapters=lambda model: slots_of(model, adapter),
    )
    slots = runners[0].adapters
    assert isinstance(slots, AdapterSlots)
    pipeline: Any = Staged(runners)
    driver = Driver(pipeline, 64)
    driver.slot_changes = [SlotChange(2, slots.host.given()[0].digest)]
    for request_id, prompt in enumerate(PROMPTS):
        driver.add(request_id, prompt, adapter_slot=2 * (request_id % 2))
    driver.step({request_id: len(prompt) for request_id, prompt in enumerate(PROMPTS)})
    for _ in range(NUM_TOKENS - 1):
        driver.step(dict.fromkeys(range(4), 1))
    pipeline.stop()
    assert list(driver.tokens.values()) == [without[0], own[1], without[2], own[3]]


DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"spec_method": "ngram"},
    "suffix": {"spec_method": "suffix"},
    "self": {"spec_model": "self:q4"},
    "ngram and self": {"spec_method": "ngram+self"},
    "model": {"spec_model": "drafter"},
}


@pytest.mark.parametrize(("sampling", "eager"), [(GREEDY, False), (SEEDED, True)], ids=["recorded", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_token(tmp_path: Path, drafter: str, eager: bool, sampling: SamplingParams) -> None:
    """Drafts are made without adapters, and checked with the request's."""
    base, names, slots = tmp_path / "base", ("a", "b"), (0, 1, 2, 1)
    save_tiny(base, "Llama")
    adapters = [save_adapter(tmp_path / name, base, rank=rank, seed=rank) for name, rank in (("a", 4), ("b", 7))]
    flags = DRAFTERS[drafter] | {"enforce_eager": eager}
    if drafter == "model":
        save_tiny(tmp_path / "drafter", "Llama", num_hidden_layers=1)
        flags["spec_model"] = str(tmp_path / "drafter")
    expected = drafted(start(base, adapters, spec_method="none", enforce_eager=eager), names, slots, sampling, 0)
    assert len({*map(tuple, expected)}) == len(slots)
    runner = start(base, adapters, spec_tokens=4, **flags)
    while runner.proposer.prepare():
        pass
    for method in range(len(runner.proposer.methods)):
        runner.proposer.prefer(method)
        assert drafted(runner, names, slots, sampling, 4) == expected
        assert drafted(runner, names[::-1], (0, 2, 1, 2), sampling, 4) == expected, "slots changed hands"


def drafted(
    runner: ModelRunner, names: Sequence[str], slots: Sequence[int], sampling: SamplingParams, num_drafts: int
) -> list[list[int]]:
    """Returns the tokens of PROMPTS[i] with slots[i], all in the same steps, each with so many drafts."""
    runner.reset()
    driver = Driver(runner, min(group.num_blocks for group in runner.kv_groups))
    driver.slot_changes = changes(runner, *names)
    for request_id, slot in enumerate(slots):
        driver.add(request_id, PROMPTS[request_id], sampling, adapter_slot=slot)
    driver.step({request_id: len(PROMPTS[request_id]) for request_id in range(len(slots))})
    while running := [one for one, tokens in driver.tokens.items() if len(tokens) < NUM_TOKENS]:
        driver.step(dict.fromkeys(running, 1 + num_drafts), dict.fromkeys(running, num_drafts) if num_drafts else None)
    runner.reset()
    return [tokens[:NUM_TOKENS] for tokens in driver.tokens.values()]


def test_an_adapter_applies_to_weights_that_replace_others(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_tiny(base, "Llama")
    other = test_replacement.save_other(base, tmp_path / "other")
    adapter = save_adapter(tmp_path / "a", base)
    expected = together(start(merged(tmp_path / "merged", other, adapter)), (), [0] * 4)
    runner = start(base, (adapter,))
    before = together(runner, ("a",), [1] * 4)
    config = ExecutorConfig(model=str(base), dtype="float32", device="cpu")
    test_replacement.load(config, runner, other).install(runner)
    assert together(runner, ("a",), [1] * 4) == expected != before
