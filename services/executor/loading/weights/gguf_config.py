"""The configuration of a model from GGUF metadata: llama.cpp's keys to those of `config.json`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeGuard

import numpy as np
import torch
from gguf import GGMLQuantizationType

from pagewire.files.gguf import TOKENS
from pagewire.files.tokenizer_files.end_tokens import END_KEYS, end_token_ids_by_text
from pagewire.services.executor.config.model_config import DecoderConfig, ModelConfig, ModelLoadError
from pagewire.services.executor.loading.weights.gguf_file import GgufFile
from pagewire.services.executor.loading.weights.gguf_names import (
    LONGROPE_FACTORS,
    ROPE_FACTORS,
    form_of,
    heads_of,
)
from pagewire.services.executor.models.registry import ARCHITECTURES, of_gguf

# llama.cpp's numbers (`llama_pooling_type`); 4 stands for a classification head
_POOLING = {0: None, 1: "mean", 2: "cls", 3: "lasttoken", 4: None}
_ATTENTION_BIASES = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")


def gguf_architecture(file: GgufFile) -> str:
    """Hugging Face class name, or the name in the file for an architecture that we do not implement."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelLoadError(f"{file.path}: metadata key general.architecture is missing: not a language model")
    known = of_gguf(arch, file.stated)
    return arch if known is None else known.name


def gguf_eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The tokens that end an output: those which the file names, then those known by their text."""
    tokens = file.metadata.get(TOKENS)  # the tokenizer checks their type
    named = [token_id for key in END_KEYS if (token_id := file.integer(key)) is not None]
    return tuple(dict.fromkeys((*named, *end_token_ids_by_text(tokens if _are_texts(tokens) else ()))))


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value[:1])  # a list has items of one type


def gguf_config(file: GgufFile, dtype: torch.dtype) -> ModelConfig:
    """Translates GGUF metadata into the keys of `config.json` and reads those as for any other model."""
    keys = gguf_config_keys(file)
    try:
        read: ModelConfig = ARCHITECTURES[gguf_architecture(file)].read_config(keys, dtype)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file.path}: {error}") from error
    config = dataclasses.replace(read, pooling=_pooling(file))
    if ROPE_FACTORS not in file.tensors:
        return config
    if not isinstance(config, DecoderConfig):
        raise ModelLoadError(
            f"{file.path}: tensor {ROPE_FACTORS}: {config.architecture} has no rotary positions to scale"
        )
    factors = tuple(_float_vector(file, ROPE_FACTORS))
    expected = config.rope.rotary_dim(config.head_dim) // 2
    if len(factors) != expected or not all(0 < factor < math.inf for factor in factors):
        raise ModelLoadError(f"{file.path}: tensor {ROPE_FACTORS}: expected {expected} positive numbers")
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, frequency_factors=factors))


def _pooling(file: GgufFile) -> str | None:
    """By sentence-transformers' name."""
    key = f"{file.metadata['general.architecture']}.pooling_type"
    number = file.integer(key, 0)
    if number not in _POOLING:
        raise ModelLoadError(
            f"{file.path}: metadata key {key} is {number}: not one of {', '.join(map(str, _POOLING))}; use a model "
            "that makes vectors, or generates"
        )
    return _POOLING[number]


def gguf_config_keys(file: GgufFile) -> dict[str, Any]:
    """Returns what `config.json` would say, for an architecture that we implement. Raises ModelLoadError naming the
    key."""
    arch = file.metadata["general.architecture"]
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing: not a language model")
    num_layers = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if (block_count := file.integer(f"{arch}.block_count")) != num_layers:
        raise ModelLoadError(f"{file.path}: {arch}.block_count is {block_count}, found tensors of {num_layers} blocks")
    form = form_of(file)
    keys = {
        "architectures": [gguf_architecture(file)],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": file.positive(f"{arch}.embedding_length"),
        "num_hidden_layers": num_layers,
        "max_position_embeddings": file.positive(f"{arch}.context_length"),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(gguf_eos_token_ids(file)),
        **(_attention_keys(file, arch, num_layers) if form.attends else {}),
    }
    stated = {
        **{key: file.positive(f"{arch}.{name}") for name, key in form.sizes.items()},
        **{key: file.integer(f"{arch}.{name}", 0) for name, key in form.counts.items()},
        **{key: file.number(f"{arch}.{name}") for name, key in form.numbers.items()},
        **{key: file.flag(f"{arch}.{name}") for name, key in form.flags.items()},
    }
    keys |= {key: value for key, value in stated.items() if value is not None}
    if form.derived_keys is None:
        return keys
    try:
        return keys | dict(form.derived_keys(keys, file.stated))
    except ModelLoadError as error:
        raise ModelLoadError(f"{file.path}: {error}") from error


def _attention_keys(file: GgufFile, arch: str, num_layers: int) -> dict[str, Any]:
    heads, window = heads_of(file), file.integer(f"{arch}.attention.sliding_window", 0)
    return {
        "intermediate_size": file.positive(f"{arch}.feed_forward_length"),
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "attention_bias": not file.tensors.keys().isdisjoint(_ATTENTION_BIASES),
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
        "rope_parameters": _rope_keys(file, f"{arch}.rope.", heads.head_dim),
        **_experts_keys(file, arch),
        **_layer_types(file, f"{arch}.attention.sliding_window_pattern", num_layers),
    }


def _layer_types(file: GgufFile, key: str, num_layers: int) -> dict[str, Any]:
    """Returns the layers with the window, if the file lists them."""
    pattern = file.metadata.get(key)
    if not isinstance(pattern, list):  # else a number: the architectures that have one know it
        return {}
    if len(pattern) != num_layers or not all(isinstance(windowed, bool) for windowed in pattern):
        raise ModelLoadError(
            f"{file.path}: metadata key {key}: expected true or false for each of {num_layers} layers, found "
            f"{pattern!r:.60}; the file is damaged: download or convert it again"
        )
    return {"layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern]}


def _experts_keys(file: GgufFile, arch: str) -> dict[str, Any]:
    if not (num_experts := file.integer(f"{arch}.expert_count", 0)):
        return {}
    size, top_k = file.positive(f"{arch}.feed_forward_length"), file.positive(f"{arch}.expert_used_count")
    return {
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        # llama.cpp's values for missing keys (`llama-model.cpp`, qwen2moe and qwen3moe)
        "moe_intermediate_size": file.positive(f"{arch}.expert_feed_forward_length", size // top_k),
        "shared_expert_intermediate_size": file.positive(f"{arch}.expert_shared_feed_forward_length", size),
    }


def _rope_keys(file: GgufFile, prefix: str, head_dim: int) -> dict[str, Any]:
    def number(key: str, default: float | None = None) -> Any:
        return file.number(prefix + key, default)

    factor = number("scaling.factor", number("scale_linear", 1.0))
    rope_type = file.text(f"{prefix}scaling.type", "linear" if factor != 1.0 else "none")
    rotary_dim = file.positive(f"{prefix}dimension_count", head_dim)
    if rotary_dim > head_dim:
        raise ModelLoadError(f"{file.path}: {prefix}dimension_count is {rotary_dim}, a head has {head_dim}")
    keys = {
        "rope_type": "default" if rope_type == "none" else rope_type,
        "rope_theta": number("freq_base", 10000.0),
        "partial_rotary_factor": rotary_dim / head_dim,
    }
    attn_factor = number("scaling.attn_factor", 1.0)
    if not LONGROPE_FACTORS.keys().isdisjoint(file.tensors):
        return keys | _longrope_keys(file, attn_factor, number("scaling.original_context_length"))
    if attn_factor != 1.0 and rope_type != "yarn":
        raise ModelLoadError(f"{file.path}: {prefix}scaling.attn_factor is {attn_factor:g}: only supported with yarn")
    if rope_type == "none":
        return keys
    if attn_factor != 1.0:
        # A factor on top of what yarn itself scales attention by.
        keys["attention_factor"] = attn_factor * (1 + 0.1 * math.log(factor))
    return keys | {
        "factor": factor,
        "original_max_position_embeddings": number("scaling.original_context_length"),
        "beta_fast": number("scaling.yarn_beta_fast"),
        "beta_slow": number("scaling.yarn_beta_slow"),
    }


def _longrope_keys(file: GgufFile, attention_factor: float, original_length: float | None) -> dict[str, Any]:
    """The length must be stated, and both tensors must be there: the served length decides which one counts."""
    if original_length is None or not LONGROPE_FACTORS.keys() <= file.tensors.keys():
        raise ModelLoadError(
            f"{file.path}: {', '.join(LONGROPE_FACTORS)} and rope.scaling.original_context_length belong together, "
            "and one is missing; convert the model again"
        )
    factors = {key: _float_vector(file, name) for name, key in LONGROPE_FACTORS.items()}
    lengths = {"original_max_position_embeddings": int(original_length), "attention_factor": attention_factor}
    return {"rope_type": "longrope"} | lengths | factors


def _float_vector(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if tensor.type is not GGMLQuantizationType.F32:
        raise ModelLoadError(f"{file.path}: tensor {name} is {tensor.type.name}; only F32 is supported")
    values: list[float] = tensor.data.view(np.float32).ravel().tolist()
    return values
