"""A model is a file and an entry of the registry: all else finds out from the model what it needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagewire.config import ExecutorConfig
from pagewire.kernels.quantized import PackedGrouped
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.kv_spec import KVSpec
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.startup import start_runner
from tests.services.executor.helpers.stepping import CPU, LIMITS, Driver, check_random_steps, make_driver, prompt
from tests.services.executor.models.toy import TOY, WINDOW, ToyModel, write_toy

KINDS = ("full", "free", "window", "full")
FULL, WINDOWED = KVSpec(1, 16, torch.float32), KVSpec(2, 8, torch.float32, WINDOW)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, TOY.name, TOY)


def load_toy(directory: Path, kinds: Sequence[str] = KINDS, *, kv_cache_dtype: str = "auto", **keys: Any) -> ToyModel:
    """Loads a toy model; `keys` are further ones of its config.json."""
    write_toy(directory, kinds, **keys)
    model = load_model(directory, dtype="float32", device=CPU, load_format="dummy", kv_cache_dtype=kv_cache_dtype)
    assert isinstance(model, ToyModel)
    return model


def with_telling_weights(model: ToyModel) -> ToyModel:
    """Large enough that tokens depend on the whole context."""
    generator = torch.Generator().manual_seed(1)
    for name, target in model.load_targets().items():
        if not name.endswith("norm.weight"):
            target.normal_(0.0, 0.5, generator=generator)
    return model


def test_layers_of_equal_need_share_one_allocation(tmp_path: Path) -> None:
    model = load_toy(tmp_path)
    assert {spec: [layer.layer_idx for layer in layers] for spec, layers in kv_cache.groups(model).items()} == {
        FULL: [0, 3],
        WINDOWED: [2],
    }
    full, window = kv_cache.allocate(model, [9, 7], block_size=4, device=CPU)
    assert full.shape == (9, 2, 2, 1, 4, 16) and window.shape == (7, 1, 2, 2, 4, 8)
    assert full[5].is_contiguous() and [layer.group for layer in model.attention_layers] == [0, 1, 0]
    for layer, (cache, index) in zip(model.attention_layers, [(full, 0), (window, 0), (full, 1)], strict=True):
        layer.kv_cache[6].fill_(layer.layer_idx + 1)
        assert bool((cache[6, index] == layer.layer_idx + 1).all()) and not cache[:6].any()


def test_tokens_are_those_of_the_model_without_a_cache(tmp_path: Path) -> None:
    model = with_telling_weights(load_toy(tmp_path))
    driver = make_driver(model)
    for cache in driver.runner.kv_caches:
        cache.fill_(torch.nan)  # reading what was not written shows
    token_ids = prompt(23)
    driver.add(0, token_ids)
    driver.step({0: 9})
    driver.step({0: 14})
    while len(driver.tokens[0]) < 12:
        driver.step({0: 1})
    dense = model.dense_logits(token_ids + driver.tokens[0])
    assert driver.tokens[0] == dense[22:-1].argmax(dim=1).tolist()
    assert len(set(driver.tokens[0])) > 3, "weights must distinguish tokens"


def test_batched_equals_alone(tmp_path: Path) -> None:
    model = with_telling_weights(load_toy(tmp_path))
    check_random_steps(model, make_driver(model), seed=3)


def test_a_layer_finds_the_row_and_position_of_every_token(tmp_path: Path) -> None:
    model = load_toy(tmp_path)
    driver = make_driver(model)
    driver.add(0, prompt(4))
    driver.add(1, prompt(2))
    driver.step({0: 4, 1: 2})
    first = model.seen[-1]
    assert first.positions.tolist() == [0, 1, 2, 3, 0, 1] and first.query_start_loc.tolist() == [0, 4, 6]
    rows = first.rows.tolist()
    assert len(set(rows)) == 2 and min(rows) >= 0
    driver.step({1: 1, 0: 1})
    assert model.seen[-1].rows.tolist() == rows[::-1], "a row is a request's, wherever it stands in the batch"
    assert model.seen[-1].positions.tolist() == [2, 4]


def test_an_fp8_cache_has_scales_for_the_heads_of_each_layer(tmp_path: Path) -> None:
    model = load_toy(tmp_path, kv_cache_dtype="fp8")
    assert [tuple(layer.kv_scales.shape) for layer in model.attention_layers if layer.kv_scales is not None] == [
        (2, 1),
        (2, 2),
        (2, 1),
    ]
    driver = make_driver(model)
    assert {cache.dtype for cache in driver.runner.kv_caches} == {torch.float8_e4m3fn}
    driver.add(0, prompt(12))
    assert len(driver.generate(0, 3, first=12)) == 3


def test_scales_of_a_layer_without_a_cache_are_refused(tmp_path: Path) -> None:
    tensors = {name: target.clone() for name, target in load_toy(tmp_path).load_targets().items()}
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.2.self_attn.v_scale": torch.tensor([2.0, 3.0]),
    }
    save_file(tensors | scales, tmp_path / "model.safetensors")
    layers = load_model(tmp_path, dtype="float32", device=CPU, kv_cache_dtype="fp8").attention_layers
    assert [layer.kv_scales.tolist() for layer in layers if layer.kv_scales is not None] == [
        [[0.5], [0.5]],
        [[2.0, 3.0], [2.0, 3.0]],
        [[1.0], [1.0]],
    ]
    save_file(tensors | {"model.layers.1.self_attn.k_scale": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.self_attn\.k_scale: the model has no KV cache"):
        load_model(tmp_path, dtype="float32", device=CPU, kv_cache_dtype="fp8")


def test_its_linear_layers_can_be_quantized(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}
    model = load_toy(tmp_path, quantization_config=config)
    names = {shard.name for module in model.quantized_modules() for shard in module.shards}
    assert "model.layers.1.mix" in names and "model.layers.2.self_attn.k_proj" in names
    assert all(isinstance(part, PackedGrouped) for module in model.quantized_modules() for part in module.parts)
    driver = make_driver(model)
    driver.add(0, prompt(12))
    assert len(driver.generate(0, 3, first=12)) == 3


def test_its_checkpoint_is_read_checked_and_kept(tmp_path: Path) -> None:
    write_toy(tmp_path, KINDS)
    made = with_telling_weights(load_toy(tmp_path))
    tensors = {name: target.clone() for name, target in made.load_targets().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"dtype": "float32", "device": CPU, "weights_cache": str(tmp_path / "kept")}
    read, kept = load_model(tmp_path, **options), load_model(tmp_path, **options)
    assert len(list((tmp_path / "kept").iterdir())) == 1
    for model in (read, kept):
        driver = make_driver(model)
        driver.add(0, prompt(12))
        assert driver.generate(0, 1, first=12) == [int(made.dense_logits(prompt(12))[-1].argmax())]
    del tensors["model.layers.1.mix.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"1 tensor missing: model\.layers\.1\.mix\.weight"):
        load_model(tmp_path, **options)


@pytest.mark.parametrize("kinds", [KINDS, ("free", "free")])
def test_the_executor_starts_with_it(tmp_path: Path, kinds: Sequence[str]) -> None:
    """A model without attention keeps nothing of a token, and every row may be of full length."""
    config = ExecutorConfig(
        model="toy", device="cpu", dtype="float32", load_format="dummy", num_threads=1, max_num_seqs=4
    )
    runner, info = start_runner(config, str(write_toy(tmp_path, kinds)), lambda fraction, text: None)
    page = 16 * 2 * 16 * 4  # tokens, keys and values, elements, bytes
    assert info.kv_cache_bytes == info.num_blocks * page * (len(kinds) - kinds.count("free"))
    assert info.num_blocks == (4 * 96 // 16 if "full" in kinds else 0)
    driver = Driver(runner, 4 * 96 // 16)
    driver.add(0, prompt(12))
    assert len(driver.generate(0, 3, first=12)) == 3


def test_a_model_without_a_kv_cache_runs(tmp_path: Path) -> None:
    model = with_telling_weights(load_toy(tmp_path, ("free",)))
    assert kv_cache.allocate(model, [], 4, CPU) == [] and kv_cache.kv_groups(model, 8, LIMITS) == ()
    driver = Driver(assemble(model, LIMITS, 64, CPU), 64)
    driver.add(0, prompt(6))
    driver.step({0: 6})
    assert driver.tokens[0] == [int(model.dense_logits(prompt(6))[-1].argmax())]
