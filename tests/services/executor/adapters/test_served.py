"""Requests with adapters have the tokens of models into which the adapters are merged, whatever runs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.config import ExecutorConfig
from pagewire.kernels import ops
from pagewire.services.executor.adapters.slots import AdapterSlots
from pagewire.services.executor.graphs.capture_sizes import graph_shapes
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.graph_capture import capture_graphs
from pagewire.services.executor.start.memory_profile import profile_run
from pagewire.services.executor.start.startup import start_runner
from pagewire.services.executor.start.warm_up import warm_up
from pagewire.services.executor.step.step import InvalidStep, SlotChange
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.adapters import merged, save_adapter
from tests.services.executor.helpers.stepping import Driver, graph_steps
from tests.services.executor.models.tiny import save_tiny

NUM_BLOCKS = 48
PROMPTS = [[5, 17, 3, 60, 21, 8, 44, 12, 9, 30, 2, 51], [7, 9, 33], [40, 41, 42, 43, 44, 45, 46], [11]]


def start(model: Path, adapters: Sequence[Path] = (), /, **flags: Any) -> ModelRunner:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "num_threads": 1,
        "enable_lora": bool(adapters),
        "max_lora_rank": 8,
        "lora_modules": ",".join(f"{path.name}={path}" for path in adapters) or None,
        **flags,
    }
    return start_runner(ExecutorConfig(model=str(model), **settings), str(model), lambda fraction, text: None)[0]


def changes(runner: ModelRunner, *names: str) -> list[SlotChange]:
    """Returns the changes that put these adapters into slots 1, 2, ..."""
    if not names:
        return []
    assert isinstance(runner.adapters, AdapterSlots)
    host = runner.adapters.host
    digests = {adapter.name: adapter.digest for adapter in host.given()}
    return [SlotChange(slot, digests[name], host.get(digests[name])) for slot, name in enumerate(names, 1)]


def together(runner: ModelRunner, names: Sequence[str], slots: Sequence[int], count: int = 10) -> list[list[int]]:
    """Returns the tokens of PROMPTS[i] with slots[i], all in the same steps. names: of the adapters in slots."""
    driver = Driver(runner, min(group.num_blocks for group in runner.kv_groups))
    runner.reset()
    driver.slot_changes = changes(runner, *names)
    for request_id, slot in enumerate(slots):
        driver.add(request_id, PROMPTS[request_id], adapter_slot=slot)
    driver.step({request_id: len(PROMPTS[request_id]) for request_id in range(len(slots))})
    while len(driver.tokens[0]) < count:
        driver.step(dict.fromkeys(range(len(slots)), 1))
    runner.reset()
    return [driver.tokens[request_id] for request_id in range(len(slots))]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "recorded"])
def test_tokens_are_those_of_merged_weights(tmp_path: Path, eager: bool) -> None:
    save_tiny(tmp_path / "base", "Llama")
    base, flags = tmp_path / "base", dict[str, Any](enforce_eager=eager)
    a = save_adapter(tmp_path / "a", base, rank=4)
    b = save_adapter(tmp_path / "b", base, rank=7, names=("q_proj", "v_proj", "up_proj"), seed=1)
    alone = [together(start(base, **flags), (), (0, 0, 0, 0))]
    for adapter in (a, b):
        alone.append(together(start(merged(tmp_path / f"merged-{adapter.name}", base, adapter), **flags), (), [0] * 4))
    assert all(len({tuple(tokens[i]) for tokens in alone}) == 3 for i in range(4)), "adapters change the tokens"
    runner = start(base, (a, b), **flags)
    for slots in ((0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 1, 2), (0, 1, 2, 0)):
        expected = [alone[slot][i] for i, slot in enumerate(slots)]
        assert together(runner, ("a", "b"), slots) == expected
    assert together(runner, ("b",), (1, 0, 0, 0))[0] == alone[2][0], "a slot holds what it was given last"


def test_a_cuda_graph_keeps_its_adapters(tmp_path: Path) -> None:
    """Captured with a dummy adapter, replayed with real ones that change hands, beside requests without."""
    save_tiny(tmp_path / "base", "Llama")
    a, b = (
        save_adapter(tmp_path / name, tmp_path / "base", rank=rank, seed=rank) for name, rank in (("a", 4), ("b", 7))
    )
    runner = start(tmp_path / "base", (a, b), enforce_eager=True, spec_method="none")
    plans = [(("a", "b"), (1, 2, 0, 1)), (("b", "a"), (1, 0, 2, 2)), (("a",), (0, 0, 0, 0)), (("b",), (1, 1, 1, 1))]
    expected = [together(runner, *plan) for plan in plans]
    captured = graph_steps("captured")
    capture_graphs(runner, (1, 2, 4), lambda fraction, text: None, ReplayedFunction, (8, 16, 32))
    num_shapes = len(graph_shapes((1, 2, 4), runner.limits, 0, (8, 16, 32)))
    assert graph_steps("captured") - captured == 2 * num_shapes
    eager, replayed = graph_steps("eager"), graph_steps("replayed")
    assert [together(runner, *plan) for plan in plans] == expected
    assert (graph_steps("eager"), graph_steps("replayed")) == (eager, replayed + 10 * len(plans))


def test_a_start_for_cuda_computes_adapters_in_its_warm_up_and_its_profile(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "Llama")
    adapter = save_adapter(tmp_path / "a", tmp_path / "base", rank=4)
    runner = start(tmp_path / "base", (adapter,), enforce_eager=True, spec_method="none", max_num_seqs=2)
    calls = list[tuple[int, bool]]()
    add = ops.add_adapters

    def spy(out: Tensor, *others: Tensor) -> None:
        calls.append((len(out), bool((others[3] == 0).all())))
        add(out, *others)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ops, "add_adapters", spy)
        profile_run(runner)
        assert {(64, True), (2, True)} <= {*calls}, "the largest steps, each token with an adapter"
        calls.clear()
        warm_up(runner, torch.device("cuda"))
        assert {*calls} == {(32, True), (1, True)}
    with pytest.raises(InvalidStep, match="adapter slot 1 is empty"):
        together(runner, (), (1,))


def test_a_recorded_prompt_that_is_padded_to_as_many_requests_as_tokens(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "Llama")
    adapter = save_adapter(tmp_path / "a", tmp_path / "base", rank=4)
    expected = together(start(merged(tmp_path / "merged", tmp_path / "base", adapter)), (), (0,))
    # 12 tokens become 16, of 15 requests and one for the padding.
    assert together(start(tmp_path / "base", (adapter,), max_num_seqs=15, spec_method="none"), ("a",), (1,)) == expected
