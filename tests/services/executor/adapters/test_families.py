"""Adapters of every kind of model, dense and quantized: the tokens of weights into which the adapter is merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.services.executor.adapters.test_served import start, together
from tests.services.executor.helpers.adapters import DENSE, merged, save_adapter
from tests.services.executor.loading.quantization import test_awq, test_gptq
from tests.services.executor.loading.quantization.checkpoints import save_quantized
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.loading.weights.test_gguf_quantized import MIXTURES, SIZES, write_quantized
from tests.services.executor.models.dense.test_gemma import GEMMA3
from tests.services.executor.models.tiny import save_tiny

DENSE_FAMILIES: dict[str, dict[str, Any]] = {"Qwen3": {"head_dim": 16}, "Gemma3Text": GEMMA3}


def check(base: Path, dense: Path, adapter: Path, **flags: Any) -> None:
    """Requests with the adapter, and without beside them, have the tokens of dense weights with and without it.

    base: what is served; dense: the same weights as fp32.
    """
    without = together(start(dense, **flags), (), [0] * 4)
    expected = together(start(merged(dense.with_name("merged"), dense, adapter), **flags), (), [0] * 4)
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


def awq(path: Path) -> PreTrainedModel:
    return save_quantized(
        path, test_awq.CONFIG | {"group_size": 32}, lambda name, weight: test_awq.pack_gemm(weight, 32)
    )


def gptq(path: Path) -> PreTrainedModel:
    return save_quantized(path, test_gptq.CONFIG, lambda name, weight: test_gptq.pack(weight, 4, 32))


def gguf(path: Path) -> PreTrainedModel:
    model = tiny_model("Llama", **SIZES)
    write_quantized(path, model, "llama", MIXTURES["Q4_K_M"])
    return model


@pytest.mark.parametrize(("save", "name"), [(awq, "base"), (gptq, "base"), (gguf, "base.gguf")])
def test_quantized_models(tmp_path: Path, save: Callable[[Path], PreTrainedModel], name: str) -> None:
    save(tmp_path / name).save_pretrained(tmp_path / "dense")
    adapter = save_adapter(tmp_path / "a", tmp_path / "dense", spread=0.1)
    check(tmp_path / name, tmp_path / "dense", adapter)
