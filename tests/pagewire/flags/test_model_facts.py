"""Facts of models with anything in their files."""

import json
from pathlib import Path

import pytest

from pagewire.flags.model_facts import facts_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "max_position_embeddings": 512,
}


def test_facts_come_from_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    facts = facts_of(str(tmp_path))
    assert facts is not None
    assert (facts.architecture, facts.kv_elements, facts.max_len) == ("LlamaForCausalLM", 2 * 2 * 4 * 16, 512)


@pytest.mark.parametrize("value", [-1, 1e400, "x", [], [[]], {"a": 1}, True, 0, None, 2**70])
@pytest.mark.parametrize(
    "key", [*CONFIG, "text_config", "layer_types", "quantization_config", "head_dim", "num_key_value_heads", "dtype"]
)
def test_a_wrong_value_leaves_facts_unknown(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    facts = facts_of(str(tmp_path))
    assert facts is None or (0 <= facts.kv_elements < 2**31 and 0 <= facts.max_len < 2**31)
    assert facts is None or isinstance(facts.architecture, str)


def test_a_file_that_is_nested_too_deeply_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    assert facts_of(str(tmp_path)) is None
