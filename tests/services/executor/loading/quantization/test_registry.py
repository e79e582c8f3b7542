"""`quantization_config` with values that no tool writes: refused by ModelLoadError, never by another exception."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.config import ExecutorConfig
from pagewire.config.model_refusals import FORMAT_ALIASES
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.quantization.registry import (
    FORMATS,
    CheckpointFormat,
    check_requested,
    is_left_over,
    quantization_of,
)
from tests.sweep import examples

CONFIGS: list[dict[str, Any]] = [
    {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    },
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "format": "gptq",
        "lm_head": False,
        "pack_dtype": "int32",
        "is_marlin_format": False,
        "dynamic": {"+:.*up_proj": {"bits": 8}, "-:.*down_proj": {}},
    },
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": None,
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
                "input_activations": None,
                "output_activations": None,
            },
            "group_1": {
                "targets": ["re:.*down_proj"],
                "format": "float-quantized",
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "block",
                    "block_structure": [128, 128],
                },
                "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True},
            },
        },
    },
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": None,
        "ignored_layers": ["lm_head"],
    },
    {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": None,
    },
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.floats(), st.sampled_from(["", "re:(", "4", "gptq", "Linear"])
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(st.sampled_from(["a", "-:(", "bits"]), SCALARS)
)


def paths_of(value: Any) -> list[list[Any]]:
    """Returns the path of everything within, each a list of keys to go down by."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in ([key], *([key, *deeper] for deeper in paths_of(inner)))]


def test_every_format_is_tested_here() -> None:
    assert {config["quant_method"] for config in CONFIGS} == FORMATS.keys()


def test_the_flag_takes_every_format_by_every_name() -> None:
    """The flags say so without importing torch."""
    (field,) = (field for field in dataclasses.fields(ExecutorConfig) if field.name == "quantization")
    assert sorted(field.metadata["choices"]) == sorted([*FORMATS, *FORMAT_ALIASES, "gguf", "none"])


@pytest.mark.parametrize("known", FORMATS.values(), ids=lambda known: known.name)
def test_other_programs_names_mean_the_same(known: CheckpointFormat) -> None:
    (config,) = (config for config in CONFIGS if config["quant_method"] == known.name)
    for name in (known.name, *(alias for alias, means in FORMAT_ALIASES.items() if means == known.name)):
        check_requested(name, quantization_of(config, None))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["quant_method"])
def test_unchanged(config: dict[str, Any]) -> None:
    found = quantization_of(config, None)
    assert found.method == config["quant_method"]
    assert found.format("model.layers.0.mlp.up_proj") is not None
    assert found.format("lm_head") is None
    check_requested(config["quant_method"], found)
    with pytest.raises(ModelLoadError, match=f"--quantization hqq: the checkpoint is quantized with {found.method}"):
        check_requested("hqq", found)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["quant_method"])
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_value_anywhere(config: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(config)
    path = data.draw(st.sampled_from(paths_of(config)))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(VALUES)
    try:
        weight_format = quantization_of(changed, None).format("model.layers.0.mlp.down_proj")
        if weight_format is not None:
            weight_format.random(128, 128, torch.Generator()).dequantize()
    except ModelLoadError as error:
        assert "quantization_config" in str(error) or "group size" in str(error)


@pytest.mark.parametrize("config", [[], "awq", 4, {"quant_method": "hqq"}, {"quant_method": ["awq"]}, {}])
def test_configs_that_are_none(config: Any) -> None:
    with pytest.raises(ModelLoadError, match="quantization_config"):
        quantization_of(config, None)


DENSE = {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["quant_method"])
def test_a_config_left_over_from_a_quantized_checkpoint(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight is dense; .* none"):
        is_left_over(config, DENSE, None)
    assert not caplog.records
    assert is_left_over(config, DENSE, "none")
    assert f"quantized with {config['quant_method']}" in caplog.text and "it is ignored" in caplog.text


def test_configs_that_leave_all_dense_fit_dense_checkpoints() -> None:
    all_dense = CONFIGS[0] | {"modules_to_not_convert": ["mlp", "self_attn"]}
    only_kv_cache = CONFIGS[2] | {"config_groups": {"g": {"targets": ["LlamaAttention"], "weights": None}}}
    for config in (all_dense, only_kv_cache):
        assert not is_left_over(config, DENSE, None)
    assert not is_left_over(CONFIGS[0], DENSE | {"model.layers.1.mlp.up_proj.qweight"}, "none")
