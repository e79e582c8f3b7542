"""The description of each architecture in the model file that implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from pagewire.services.executor.config.model_config import ModelConfig
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.config_keys import checked_keys
from pagewire.services.executor.models.protocol import OwnModel

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

# A tensor of concatenated queries, keys and values
FUSED_HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

# llama.cpp's names for a mixture of experts, instead of `ffn_gate`, `ffn_up` and `ffn_down`; {} is the expert
EXPERTS_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}

# `Architecture.aliases` of experts as transformers holds them, and saves them with save_original_format=False
EXPERTS_ALIASES = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}


@dataclass(frozen=True)
class Interleaved:
    """An entry of `Architecture.aliases`: rows of the tensors called `names` alternate."""

    names: tuple[str, ...]
    transposed: bool = False  # the model's rows are columns in the checkpoint


@dataclass(frozen=True)
class GgufForm:
    """An architecture as llama.cpp writes it."""

    name: str  # metadata key general.architecture
    interleaved_rotary: bool = False  # neighbouring rows of q and k are rotated, not rows half a head apart
    qkv_apart: bool = False  # `query_key_value` has all queries, all keys, all values, not head by head
    layers: str = "model.layers"  # the module of the blocks
    # Module (or tensor, if it has its own name) -> its name within a block, or outside of all. Three names are
    # concatenated queries, keys and values. In a name, {} is the expert, for a tensor that has all experts.
    names: Mapping[str, str | tuple[str, str, str]] = field(default_factory=lambda: DECODER_NAMES)
    norms_with_one: bool = False  # 1 was added to the weights of norms
    attends: bool = True  # there are keys that describe attention and feed-forward
    # End of a checkpoint's name -> function of the shape in the file to the checkpoint's
    shapes: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = field(default_factory=dict)
    # End of a vector's name in a checkpoint -> function of the values in the file to the checkpoint's
    values: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    # Metadata key without the architecture's name -> key of config.json
    sizes: Mapping[str, str] = field(default_factory=dict)  # positive and whole; none may be missing
    counts: Mapping[str, str] = field(default_factory=dict)  # whole, 0 where they are missing
    numbers: Mapping[str, str] = field(default_factory=dict)  # positive
    flags: Mapping[str, str] = field(default_factory=dict)
    # `GgufFile.stated` -> whether it is this architecture, if llama.cpp gives several the same name.
    when: Callable[[Mapping[str, Any]], bool] = lambda stated: True
    # Keys of config.json derived from the keys that all files have (`gguf_config_keys`), and from other statements.
    derived_keys: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Architecture(Generic[Config]):
    """One entry of the registry."""

    name: str  # the class in config.json's `architectures`
    model_type: str  # config.json's key of this name; it selects transformers' class that reads the other keys
    parse: Callable[[Mapping[str, Any], torch.dtype], Config]  # keys of config.json, dtype to compute in
    # (config, max_model_len, placement of the model): without weights; on the device "meta" it takes no memory
    model: Callable[[Config, int, Placement], OwnModel]
    gguf: GgufForm | None = None
    # Other names of tensors in checkpoints: end of such a name -> the ends of the names of equal shares of its rows. A
    # name with {} stands for each expert, if the tensor has all experts one behind the other.
    aliases: Mapping[str, tuple[str, ...] | Interleaved] = field(default_factory=dict)
    quantizable: bool = False  # by `pagewire quantize`, which knows decoder layers like Llama's
    reference: str = "transformers"  # tests marked `architecture` compare it with this
    base: str = "model."  # prefix of all names except the head's
    # Prefixes of tensor names in checkpoints, with `base` or more -> prefix here.
    prefixes: Mapping[str, str] = field(default_factory=dict)
    has_parts: bool = False  # `parse` reads all parts of config.json, not only its text_config
    # Keys of config.json that an example of the family needs in addition to transformers' defaults.
    example: Mapping[str, Any] = field(default_factory=dict)

    def read_config(self, raw: Mapping[str, Any], dtype: torch.dtype) -> Config:
        """Returns the config. raw: keys of config.json. Raises ModelLoadError naming a key with an invalid value."""
        return self.parse(checked_keys(raw), dtype)
