"""Ranks that share a model's layers generate what the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from tests.services.executor.helpers.stepping import alone
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.parallel.threads import on_ranks

NUM_TOKENS = 12
PROMPTS = [np.random.default_rng(seed).integers(3, 67, length).tolist() for seed, length in ((0, 21), (1, 5))]

MOE = {"num_experts": 6, "moe_intermediate_size": 96, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
# family, ranks, changes of the tiny config; heads of 8
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("Llama", 2, {"attention_bias": True, "mlp_bias": True}),
    ("Llama", 3, {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}),
    ("Llama", 4, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    ("Qwen3", 2, {"head_dim": 16}),
    ("Gemma3Text", 2, {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}),
    ("Mixtral", 2, {"intermediate_size": 96, "num_local_experts": 4}),
    ("Qwen3Moe", 3, {**MOE, "head_dim": 16, "num_key_value_heads": 1}),
    ("Qwen2Moe", 2, {**MOE, "shared_expert_intermediate_size": 64}),
    ("GptOss", 2, {"intermediate_size": 32, "num_local_experts": 4, "head_dim": 16, "num_hidden_layers": 2}),
    ("DeepseekV2", 2, {**MLA, "num_attention_heads": 4}),
    ("DeepseekV3", 2, {**MLA, "num_attention_heads": 4, "q_lora_rank": None}),
    ("Olmo2", 2, {}),
    ("Olmo2", 3, {"num_key_value_heads": 1, "intermediate_size": 96}),
    ("Phi3", 2, {}),
    ("Glm4", 2, {"head_dim": 8}),
    (
        "GPT2",
        2,
        {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "n_inner": 80, "tie_word_embeddings": False},
    ),
    ("GPTNeoX", 3, {"intermediate_size": 96}),
    (
        "Falcon",
        2,
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80, "tie_word_embeddings": False},
    ),
    ("Cohere", 2, {"logit_scale": 1.0}),
    ("Phi", 2, {"num_key_value_heads": 6}),
]


def tokens_of(path: Path, ranks: Communicator = ALONE, **options: Any) -> list[list[int]]:
    model = load(path, tensor=ranks, **options)
    return [alone(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def assert_equal_on_ranks(path: Path, size: int, *, whole_experts: bool = False, **options: Any) -> None:
    """Loads the parts of a model. options: as for `load_model`, with whole_experts of the ranks alone."""
    expected = tokens_of(path, **options)
    assert len({token for tokens in expected for token in tokens}) > 2, "the model says something"
    options["whole_experts"] = whole_experts
    for rank, tokens in enumerate(on_ranks(size, lambda ranks: tokens_of(path, ranks, **options))):
        assert tokens == expected, f"rank {rank}"


@pytest.mark.parametrize(("family", "size", "changes"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
@pytest.mark.few(
    "Llama-3",
    "Gemma3Text-2",
    "Mixtral-2",
    "Qwen2Moe-2",
    "GptOss-2",
    "DeepseekV3-2",
    "Phi3-2",
    "GPT2-2",
    "Falcon-2",
    "Cohere-2",
)
def test_greedy_tokens(tmp_path: Path, family: str, size: int, changes: dict[str, Any]) -> None:
    save_tiny(tmp_path, family, **changes)
    assert_equal_on_ranks(tmp_path, size)


class Counting:
    """A communicator that counts its sums."""

    def __init__(self, ranks: Communicator) -> None:
        self.rank, self.size, self._ranks = ranks.rank, ranks.size, ranks
        self.all_gather, self.broadcast = ranks.all_gather, ranks.broadcast
        self.num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return self._ranks.all_reduce(x)


@pytest.mark.parametrize(
    ("family", "sums"), [("Llama", 2), ("Cohere", 1), ("GPTNeoX", 1), ("Qwen2Moe", 2), ("DeepseekV2", 2)]
)
def test_what_is_added_is_summed_once(tmp_path: Path, family: str, sums: int) -> None:
    """Tests attention and feed-forward side by side, and of shared experts beside routed ones."""
    size, changes = next((size, changes) for name, size, changes in CASES if name == family)
    save_tiny(tmp_path, family, num_hidden_layers=3, **changes)

    def num_sums(ranks: Communicator) -> int:
        counting = Counting(ranks)
        alone(load(tmp_path, tensor=counting), PROMPTS[0], 1)
        return counting.num_sums

    assert on_ranks(size, num_sums) == [1 + 3 * sums] * size  # the embedding is summed, too


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("Llama", 4, "6 heads with 2 of keys and values cannot be split; possible are 1, 2, 6"),
        ("Mamba2", 2, "tensor parallel is not supported for Mamba2ForCausalLM"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, family: str, size: int, message: str) -> None:
    changes = {"num_heads": 6, "head_dim": 16, "state_size": 16, "n_groups": 1} if family == "Mamba2" else {}
    save_tiny(tmp_path, family, **changes)
    with pytest.raises(ModelLoadError, match=message):
        on_ranks(size, lambda ranks: load(tmp_path, tensor=ranks))
