"""Whatever value a key of config.json has: an architecture reads it, or says which key is wrong, which value it has and
what to do."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.models.registry.table import example_config
from tests.sweep import examples

# Of each, an architecture that reads it, and a value that no model has.
WRONG: list[tuple[str, str, Any]] = [
    ("DeepseekV2ForCausalLM", "first_k_dense_replace", "1"),
    ("DeepseekV2ForCausalLM", "first_k_dense_replace", -1),
    ("DeepseekV3ForCausalLM", "routed_scaling_factor", [2.5]),
    ("DeepseekV3ForCausalLM", "norm_topk_prob", "yes"),
    ("GptOssForCausalLM", "swiglu_alpha", "big"),
    ("GptOssForCausalLM", "swiglu_limit", {}),
    ("GptOssForCausalLM", "swiglu_limit", math.nan),
    ("Qwen3MoeForCausalLM", "mlp_only_layers", 3),
    ("Qwen3MoeForCausalLM", "mlp_only_layers", [[0]]),
    ("SmolLM3ForCausalLM", "no_rope_layers", 4),
    ("SmolLM3ForCausalLM", "no_rope_layers", ["no"] * 8),
    ("RobertaModel", "pad_token_id", "<pad>"),
    ("ModernBertModel", "local_attention", "128"),
    ("ModernBertModel", "global_attn_every_n_layers", 0),
    ("ModernBertModel", "layer_types", "full_attention"),
    ("ModernBertModel", "layer_types", [["full_attention"]]),
    ("ModernBertModel", "hidden_activation", ["gelu"]),
    ("ModernBertModel", "norm_eps", "small"),
    ("Gemma3ForCausalLM", "sliding_window_pattern", 0),
    ("Gemma3ForCausalLM", "rope_local_base_freq", "10000"),
    ("Gemma3ForCausalLM", "attn_logit_softcapping", -1.0),
    ("Gemma3ForCausalLM", "rope_scaling", [8.0]),
    ("LlamaForCausalLM", "hidden_act", ["silu"]),
    ("LlamaForCausalLM", "hidden_act", {}),
    ("LlamaForCausalLM", "attention_bias", "false"),
    ("LlamaForCausalLM", "num_hidden_layers", 1 << 70),
    ("LlamaForCausalLM", "hidden_size", 1 << 70),
]
VALUES = st.one_of(
    st.sampled_from([None, True, False, math.nan, math.inf, 1 << 70, [], {}, "", [[1]], [0.5] * 3, {"x": 1}]),
    st.integers(-2, 9),
    st.floats(-3, 3),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-1, 2), st.text(max_size=1)), max_size=3),
)


@cache
def example(name: str) -> dict[str, Any]:
    """Returns an example config with few layers."""
    keys = example_config(ARCHITECTURES[name])
    parts = [keys, keys["text_config"]] if "text_config" in keys else [keys]
    for part in parts:
        part["num_hidden_layers"] = 2
        if isinstance(part.get("layer_types"), list):
            part["layer_types"] = part["layer_types"][:2]
    return keys


def build(name: str, keys: dict[str, Any]) -> None:
    architecture = ARCHITECTURES[name]
    config = architecture.read_config(keys, torch.float32)
    architecture.model(config, 64, Placement(config.dtype, torch.device("meta")))


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_a_wrong_value_is_named(name: str, key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError) as caught:
        build(name, example(name) | {key: value})
    message = str(caught.value)
    assert message.startswith(f"config key {key}: expected ") and f"found {value!r:.100}" in message
    assert message.endswith("correct config.json, or put another value over it with --hf-overrides")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("MixtralForCausalLM", "num_local_experts"),
        ("DeepseekV3ForCausalLM", "n_routed_experts"),
    ],
)
def test_more_experts_than_there_can_be_are_refused_at_once(name: str, key: str) -> None:
    with pytest.raises(ModelLoadError, match=r"config: 134217728 experts in a layer are not supported, 4096 are"):
        build(name, example(name) | {key: 1 << 27})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("DeepseekV3ForCausalLM", "routed_scaling_factor"),
        ("DeepseekV2ForCausalLM", "first_k_dense_replace"),
        ("GptOssForCausalLM", "swiglu_limit"),
        ("ModernBertModel", "local_attention"),
        ("LlamaForCausalLM", "hidden_act"),
        ("LlamaForCausalLM", "rms_norm_eps"),
    ],
)
def test_null_is_as_if_the_key_were_missing(name: str, key: str) -> None:
    keys = example(name)
    read = ARCHITECTURES[name].read_config
    without = {other: value for other, value in keys.items() if other != key}
    assert read(keys | {key: None}, torch.float32) == read(without, torch.float32)


def test_no_soft_cap_is_a_value() -> None:
    config = ARCHITECTURES["Gemma2ForCausalLM"].read_config(
        example("Gemma2ForCausalLM") | {"attn_logit_softcapping": None}, torch.float32
    )
    assert config.attention_soft_cap == 0.0


def test_a_key_of_a_part_is_named_with_its_part() -> None:
    keys = example("Gemma3ForConditionalGeneration")
    text = keys["text_config"] | {"sliding_window_pattern": 0}
    with pytest.raises(ModelLoadError, match=r"config key text_config\.sliding_window_pattern: expected a positive"):
        build("Gemma3ForConditionalGeneration", keys | {"text_config": text})


@settings(max_examples=examples(250), deadline=None)
@given(data=st.data())
def test_no_value_of_any_key_is_a_traceback(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(ARCHITECTURES)))
    keys = dict(example(name))
    part = data.draw(st.sampled_from(["", *(part for part in ("text_config", "vision_config") if part in keys)]))
    known = sorted({*(keys[part] if part else keys), *(key for _, key, _ in WRONG)})
    key = data.draw(st.sampled_from([key for key in known if key not in ("architectures", "model_type")]))
    value = data.draw(VALUES)
    changed = {part: keys[part] | {key: value}} if part else {key: value}
    try:
        build(name, keys | changed)
    except ModelLoadError:
        pass
