"""StarCoder2, GPT-NeoX, GPT-2, Falcon and Phi: LayerNorm, biases and plain feed-forward blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.models.dense.falcon import falcon_config
from tests.services.executor.helpers.stepping import check_random_steps
from tests.services.executor.models.tiny import TINY, assert_same_logits, load, save_tiny

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2 window": ("Starcoder2", {"sliding_window": 5}),
    "starcoder2 without biases, untied": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox one after the other": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": ("GPT2", {"n_inner": 80, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2 unscaled": ("GPT2", {"scale_attn_weights": False, "activation_function": "gelu"}),
    "falcon one KV head": ("Falcon", {}),
    "falcon new architecture": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon new architecture, one norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon one after the other": (
        "Falcon",
        {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 80, "tie_word_embeddings": False},
    ),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
}


@pytest.mark.architecture(
    "Starcoder2ForCausalLM", "GPTNeoXForCausalLM", "GPT2LMHeadModel", "FalconForCausalLM", "PhiForCausalLM"
)
@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path: Path, case: str) -> None:
    family, overrides = CASES[case]
    expected = save_tiny(tmp_path, family, **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def test_linear_biases_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="config key alibi"):
        falcon_config({**TINY, "architectures": ["FalconForCausalLM"], "alibi": True}, torch.float32)


@pytest.mark.skipif(cpu_backend() != "cpp", reason="without a C++ compiler steps are not recorded")
@pytest.mark.parametrize("family", ["GPTNeoX", "GPT2"])
def test_recorded_steps_change_no_token(tmp_path: Path, family: str) -> None:
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps
    from pagewire.services.executor.start.assembly import assemble
    from tests.services.executor.helpers.stepping import CPU, LIMITS, Driver

    save_tiny(tmp_path, family, vocab_size=200, max_position_embeddings=96, n_positions=96)
    model = load(tmp_path)
    runner = assemble(model, LIMITS, 64, CPU, graphs=RecordedSteps(LIMITS.max_num_seqs, 32))
    check_random_steps(model, Driver(runner, 64), seed=1)
