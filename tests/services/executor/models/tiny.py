"""Tiny random models of transformers, and ours beside them: what the tests of every architecture share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model
from tests.services.executor.helpers.paged_batch import mixed_batch_logits

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}

ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
}


def save_tiny(path: Path, family: str, **overrides: Any) -> PreTrainedModel:
    """Saves a random model of a transformers family and returns it, in fp32 with eager attention."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(TINY | overrides))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases away from their neutral start values
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    model.save_pretrained(path)
    return model


def load(path: Path, **options: Any) -> Model:
    return load_model(path, **{"dtype": "float32", "device": CPU, **options})


@torch.inference_mode()
def assert_same_logits(model: Model, expected: PreTrainedModel) -> None:
    for ids, logits in mixed_batch_logits(model, model.config.vocab_size):
        reference = expected(torch.tensor([ids])).logits[0]
        assert reference.std() > 0.1, "the tiny model must distinguish tokens"
        torch.testing.assert_close(logits, reference, atol=2e-4, rtol=1e-4)
