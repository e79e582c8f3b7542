"""Adapters of every kind of model, dense and quantized: the tokens of weights into which the adapter is merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from pagewire.kernels import ops
from pagewire.services.executor.layers.experts import experts
from tests.services.executor.adapters.test_served import start, together
from tests.services.executor.helpers.adapters import DENSE, merged, save_adapter, save_stacked
from tests.services.executor.loading.quantization import test_awq, test_gptq
from tests.services.executor.loading.quantization.checkpoints import save_quantized
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.loading.weights.test_gguf_quantized import MIXTURES, SIZES, write_quantized
from tests.services.executor.models.dense.test_gemma import GEMMA3
from tests.services.executor.models.experts import test_quantized_experts
from tests.services.executor.models.experts.test_experts import EXPERTS, SHARED
from tests.services.executor.models.tiny import save_tiny

DENSE_FAMILIES: dict[str, dict[str, Any]] = {"Qwen3": {"head_dim": 16}, "Gemma3Text": GEMMA3}


MIXTURES_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "Mixtral": {"num_local_experts": 4, "sliding_window": 5},
    "Qwen2Moe": SHARED,
}


def check(base: Path, dense: Path, adapter: Path, changed: Path | None = None, **flags: Any) -> None:
    """Requests with the adapter, and without beside them, have the tokens of dense weights with and without it.

    base: what is served; dense: the same weights as fp32; changed: these with the adapter, by default merged here.
    """
    changed = changed or merged(dense.with_name("merged"), dense, adapter)
    without = together(start(dense, **flags), (), [0] * 4)
    expected = together(start(changed, **flags), (), [0] * 4)
    assert all(with_it != own for with_it, own in zip(expected, without, strict=True)), "the adapter changes tokens"
    runner = start(base, (adapter,), **flags)
    assert together(runner, (adapter.name,), (1, 1, 1, 1)) == expected
    beside = [without[0], expected[1], without[2], expected[3]]
    assert together(runner, (adapter.name,), (0, 1, 0, 1)) == beside


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_dense_models(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path / "base", family, **DENSE_FAMILIES[family])
    adapter = save_adapter(tmp_path / "a", tmp_path / "base", names=DENSE)
    check(tmp_path / "base", tmp_path / "base", adapter)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "recorded"])
@pytest.mark.parametrize("family", MIXTURES_OF_EXPERTS)
def test_all_experts_at_once(tmp_path: Path, family: str, eager: bool) -> None:
    """Tests what PEFT writes for models in which transformers keeps all experts in one parameter."""
    base = tmp_path / "base"
    save_tiny(base, family, **MIXTURES_OF_EXPERTS[family])
    adapter = save_stacked(tmp_path / "a", tmp_path / "changed", base)
    check(base, base, adapter, tmp_path / "changed", enforce_eager=eager)


def test_experts_pairs_in_the_order_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_sorts_pairs", lambda slots: True)
    neighbours, add = list[list[int]](), ops.add_adapters

    def spy(out: Tensor, x: Tensor, down: Tensor, up: Tensor, slots: Tensor, *others: Tensor) -> None:
        neighbours.extend([slots.tolist()] * (down.shape[0] > 4))  # of experts: 4 slots for each
        add(out, x, down, up, slots, *others)

    monkeypatch.setattr(ops, "add_adapters", spy)
    base = tmp_path / "base"
    save_tiny(base, "Qwen3Moe", **MIXTURES_OF_EXPERTS["Qwen3Moe"])
    adapter = save_stacked(tmp_path / "a", tmp_path / "changed", base)
    check(base, base, adapter, tmp_path / "changed", enforce_eager=True)
    assert neighbours and all(slots == sorted(slots) for slots in neighbours)


@pytest.mark.parametrize("family", MIXTURES_OF_EXPERTS)
def test_each_expert_by_itself(tmp_path: Path, family: str) -> None:
    """Tests experts under their names in checkpoints; attention, the router and shared experts beside them."""
    base = tmp_path / "base"
    save_tiny(base, family, **MIXTURES_OF_EXPERTS[family])
    names = (*DENSE, "shared_expert_gate", ".gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    check(base, base, save_adapter(tmp_path / "a", base, names=names, spread=0.2))


def awq(path: Path) -> PreTrainedModel:
    return save_quantized(
        path, test_awq.CONFIG | {"group_size": 32}, lambda name, weight: test_awq.pack_gemm(weight, 32)
    )


def gptq(path: Path) -> PreTrainedModel:
    return save_quantized(path, test_gptq.CONFIG, lambda name, weight: test_gptq.pack(weight, 4, 32))


def awq_experts(path: Path) -> PreTrainedModel:
    config, packer, _ = test_quantized_experts.FORMATS["awq"]
    return test_quantized_experts.save_quantized(path, config, packer)


def gguf(path: Path) -> PreTrainedModel:
    model = tiny_model("Llama", **SIZES)
    write_quantized(path, model, "llama", MIXTURES["Q4_K_M"])
    return model


@pytest.mark.parametrize(("save", "name"), [(awq, "base"), (gptq, "base"), (awq_experts, "base"), (gguf, "base.gguf")])
def test_quantized_models(tmp_path: Path, save: Callable[[Path], PreTrainedModel], name: str) -> None:
    save(tmp_path / name).save_pretrained(tmp_path / "dense")
    names = (*DENSE, "mlp.gate", "gate_proj", "up_proj", "down_proj")
    adapter = save_adapter(tmp_path / "a", tmp_path / "dense", names=names, spread=0.1)
    check(tmp_path / name, tmp_path / "dense", adapter)
