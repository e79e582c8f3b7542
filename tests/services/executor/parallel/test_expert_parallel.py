"""Ranks that have whole experts each generate what the whole model does, whichever way they add up what these make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire.services.executor.layers import whole_experts
from tests.services.executor.models.tiny import save_tiny
from tests.services.executor.parallel.test_tensor_parallel import MLA, assert_equal_on_ranks

MOE = {"num_experts": 6, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
# family, changes of the tiny config; inner sizes of experts that four ranks could not share
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 80, "num_local_experts": 4}),
    "qwen2 moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 64}),
    "qwen3 moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "intermediate_size": 64}),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 48}),
    "gpt-oss": ("GptOss", {"intermediate_size": 48, "num_local_experts": 4, "num_hidden_layers": 2}),
    "deepseek-v2": ("DeepseekV2", MLA),
    "deepseek-v3": ("DeepseekV3", MLA | {"q_lora_rank": None, "n_routed_experts": 6}),
}


@pytest.fixture(params=["sums", "exchanges"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "exchanges":
        monkeypatch.setattr(whole_experts, "least_exchanged", lambda top_k, num_ranks, device: 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(tmp_path: Path, family: str, size: int) -> None:
    name, changes = FAMILIES[family]
    save_tiny(tmp_path, name, **(HEADS | changes))
    assert_equal_on_ranks(tmp_path, size, whole_experts=True)
