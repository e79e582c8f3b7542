"""Rotary frequencies of every kind, from every form of config file, against transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagewire.services.executor.config.load_error import ModelLoadError
from pagewire.services.executor.config.rope_config import RopeConfig, rope_config
from pagewire.services.executor.layers.rotary import rope_frequencies

HEAD_DIM = 16
FACTORS = {
    "short_factor": [1.0, 1.1, 1.2, 1.5, 1.6, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0, 32.0],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, of DeepSeek": {
        "factor": 40,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "longrope": FACTORS,
    "longrope, attention factor": FACTORS | {"attention_factor": 1.25, "factor": 3.0},
    "longrope, partial": {name: factors[:4] for name, factors in FACTORS.items()} | {"partial_rotary_factor": 0.5},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
}


def keys(**more: Any) -> dict[str, Any]:
    sizes = {"max_position_embeddings": 64, "hidden_size": 2 * HEAD_DIM, "num_attention_heads": 2}
    return sizes | {"head_dim": HEAD_DIM} | more


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("served", [32, 64])
@pytest.mark.parametrize("case", SCALINGS)
def test_frequencies(case: str, served: int, form: str) -> None:
    rope_type = case.partition(",")[0]
    scaling = SCALINGS[case]
    raw = keys(rope_parameters={"rope_type": rope_type, "rope_theta": 500.0} | scaling)
    if form == "rope_scaling":
        partial = {key: value for key, value in scaling.items() if key == "partial_rotary_factor"}
        old = {key: value for key, value in scaling.items() if key not in partial}
        raw = keys(rope_scaling={"type": rope_type} | old, rope_theta=500.0, **partial)
    if rope_type == "longrope":
        raw["original_max_position_embeddings"] = 32
    config = transformers.LlamaConfig(**(raw | {"rope_parameters": raw.get("rope_parameters", {})}))
    if form == "rope_scaling":
        config = transformers.LlamaConfig(**raw)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=served)
    rope = rope_config(raw)
    found = rope_frequencies(rope, rope.rotary_dim(HEAD_DIM), served)
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=0)
    assert found[1] == pytest.approx(attention_factor)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"rope_scaling": None},
        {
            "rope_parameters": None,
            "rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]},
        },
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"rope_scaling": {"rope_type": None, "factor": None, "type": None}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
    ],
)
def test_what_scales_nothing(raw: dict[str, Any]) -> None:
    rope = rope_config(keys(rope_theta=500, **raw), "full_attention")
    assert rope == RopeConfig(rope_theta=500, original_max_position_embeddings=64)


def test_kinds_of_layers_have_parameters_of_their_own() -> None:
    raw = keys(rope_parameters={"full_attention": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 2.0}, "other": {}})
    assert rope_config(raw, "full_attention").rope_type == "yarn"
    assert rope_config(raw, "other") == RopeConfig(original_max_position_embeddings=64)
    with pytest.raises(ModelLoadError, match=r"rope_parameters\.full_attention is not supported"):
        rope_config(raw)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rope_type": "ntk"}, "rope_type 'ntk' is not one of default, linear"),
        ({"rope_type": ["yarn"]}, r"rope_type \['yarn'\] is not one of"),
        ({"type": "su", "short_factor": [1.0]}, r"rope_scaling\.long_factor is missing for rope_type 'longrope'"),
        (
            {"type": "longrope", "short_factor": 1.0},
            r"rope_scaling\.short_factor: expected positive numbers, found 1\.0",
        ),
        ({"type": "linear", "factor": "2"}, r"rope_scaling\.factor: expected a number above 0, found '2'"),
        ({"type": "yarn", "factor": float("nan")}, r"rope_scaling\.factor: expected a number above 0, found nan"),
        ({"type": "yarn", "factor": 2.0, "truncate": "yes"}, r"rope_scaling\.truncate: expected true or false"),
        ({"type": "yarn", "factor": 2.0, "strange": 1}, r"rope_scaling\.strange is not supported"),
        ("yarn", "rope_scaling: expected an object, found 'yarn'"),
    ],
)
def test_what_is_wrong_is_named(params: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_config(keys(rope_scaling=params))


def test_factors_must_fit_the_head() -> None:
    rope = rope_config(keys(rope_scaling={"type": "longrope"} | FACTORS))
    with pytest.raises(ModelLoadError, match="short_factor: expected 4 numbers, found 8"):
        rope_frequencies(rope, HEAD_DIM // 2, 64)
