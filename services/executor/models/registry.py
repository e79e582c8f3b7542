"""The architectures of our own code. A new model is a file next to this one and an entry here, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from pagewire.services.executor.layers.weight_format import Quantization
from pagewire.services.executor.model_config import ModelConfig
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.llama import llama_config, mistral_config
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.models.qwen2 import qwen2_config
from pagewire.services.executor.models.qwen3 import qwen3_config

Config = TypeVar("Config", bound=ModelConfig)

# llama.cpp's names of modules -> those of the checkpoint that its converter read, within `model.layers.N.` for blocks
DECODER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GgufForm:
    """An architecture as llama.cpp writes it."""

    name: str  # metadata key general.architecture
    interleaved_rotary: bool = False  # neighbouring rows of q and k are rotated, not rows half a head apart
    names: Mapping[str, str] = field(default_factory=lambda: DECODER_NAMES)


@dataclass(frozen=True)
class Architecture(Generic[Config]):
    """One entry."""

    name: str  # the class in config.json's `architectures`
    model_type: str  # config.json's key of this name, by which transformers finds the class that reads the other keys
    read_config: Callable[[Mapping[str, Any], torch.dtype], Config]  # keys of config.json, dtype to compute in
    # (config, max_model_len, device, quantization): without weights; on the device "meta" it takes no memory
    model: Callable[[Config, int, torch.device, Quantization | None], OwnModel]
    gguf: GgufForm | None = None
    quantizable: bool = False  # by `pagewire quantize`, which knows decoder layers as Llama's


ARCHITECTURES: dict[str, Architecture[Any]] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "LlamaForCausalLM",
            "llama",
            llama_config,
            DecoderModel,
            GgufForm("llama", interleaved_rotary=True),
            quantizable=True,
        ),
        Architecture("MistralForCausalLM", "mistral", mistral_config, DecoderModel, quantizable=True),
        Architecture("Qwen2ForCausalLM", "qwen2", qwen2_config, DecoderModel, GgufForm("qwen2"), quantizable=True),
        Architecture("Qwen3ForCausalLM", "qwen3", qwen3_config, DecoderModel, GgufForm("qwen3"), quantizable=True),
    )
}


def gguf_form(name: str) -> GgufForm:
    """By the name in a GGUF file; of an architecture that is not ours, what most have in common."""
    known = of_gguf(name)
    return GgufForm(name) if known is None or known.gguf is None else known.gguf


def of_gguf(name: str) -> Architecture[Any] | None:
    """By the name in a GGUF file."""
    return next((found for found in ARCHITECTURES.values() if found.gguf is not None and found.gguf.name == name), None)
