"""Models from GGUF files: metadata to configuration, llama.cpp's tensor names to ours, dequantization."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from pagewire.services.executor.loading.weights.gguf_file import GgufFile, GgufTensor
from pagewire.services.executor.model_config import DecoderConfig, ModelConfig, ModelLoadError
from pagewire.services.executor.models.architecture import GgufForm
from pagewire.services.executor.models.registry import ARCHITECTURES, gguf_form, of_gguf

_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# LongRoPE's factors -> their key in config.json
_LONGROPE_FACTORS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}

_CHUNK_ELEMENTS = 1 << 16  # dequantized at a time: temporaries stay in the core's cache and in reused memory


class GgufSource:
    """Dequantizes tensors into the model's memory, a few rows at a time."""

    def __init__(self, file: GgufFile) -> None:
        form = _form(file)
        self._file = file
        self._tensors = named_tensors(file)
        self._heads = _heads(file) if form.interleaved_rotary else None
        self._norms_with_one = form.norms_with_one
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def raw(self, name: str) -> Tensor:
        tensor, order = self._tensors[name], self._row_order(name)
        return torch.from_numpy(tensor.data if order is None else tensor.data[order])

    def raw_dtype(self, name: str) -> torch.dtype:
        return torch.uint8

    def stored_bytes(self, name: str) -> int:
        return self._tensors[name].data.nbytes

    def type(self, name: str) -> GGMLQuantizationType:
        return self._tensors[name].type

    def read_into(self, name: str, target: Tensor, first_row: int = 0, order: Tensor | None = None) -> None:
        tensor, rows = self._tensors[name], self._row_order(name)
        if order is not None:
            rows = order.numpy() if rows is None else rows[order.numpy()]
        num_rows = target.shape[0]
        if len(tensor.shape) == 1:  # its elements may share blocks
            vector = self._dequantize(tensor, tensor.data).reshape(-1)
            if self._norms_with_one and name.endswith("norm.weight"):
                vector = vector - 1
            ordered = torch.from_numpy(vector if rows is None else vector[rows])
            target.copy_(ordered[first_row : first_row + num_rows])
            return
        values = target.view(num_rows, -1)
        data = tensor.data.reshape(tensor.shape[0], -1)
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // values.shape[1])
        for start in range(0, num_rows, rows_per_chunk):
            stop = min(start + rows_per_chunk, num_rows)
            these = slice(first_row + start, first_row + stop)
            chunk = self._dequantize(tensor, data[these] if rows is None else data[rows[these]])
            values[start:stop] = torch.from_numpy(chunk).view(-1, values.shape[1])

    def _row_order(self, name: str) -> np.ndarray | None:
        """int64: model row -> file row of a tensor whose rows change places."""
        if self._heads is None:
            return None
        if ".q_proj." in name:
            return file_rows(self._heads.num_heads, self._heads.head_dim)
        if ".k_proj." in name:
            return file_rows(self._heads.num_kv_heads, self._heads.head_dim)
        return None

    def _dequantize(self, tensor: GgufTensor, data: np.ndarray) -> np.ndarray:
        try:
            return dequantize(data.reshape(1, -1), tensor.type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self._file.path}: tensor {tensor.name} has type {tensor.type.name}, which cannot be dequantized; "
                "convert the model to another quantization"
            ) from error


def file_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """int64 [num_heads * head_dim]: model row -> file row of a q or k projection of the llama architecture.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... of a head where we rotate (0, d/2), (1, d/2 + 1), ...,
    so that model row s * d/2 + j of a head is file row 2j + s. Example, head_dim 6: [0, 2, 4, 1, 3, 5].
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def named_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """Those of the model, by the names of a Hugging Face checkpoint."""
    names = _form(file).names
    named: dict[str, GgufTensor] = {}
    for stored_name, tensor in file.tensors.items():
        name = _checkpoint_name(stored_name, names)
        if "{}" in name:
            named |= {name.format(expert): part for expert, part in enumerate(_parts(file, tensor))}
        elif name != _ROPE_FACTORS and name not in _LONGROPE_FACTORS:
            named[name] = _as_row(tensor) if name.endswith("shared_expert_gate.weight") else tensor
    return named


def _parts(file: GgufFile, tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Of each expert, of a tensor that has all experts one behind the other."""
    if len(tensor.shape) != 3:
        raise ModelLoadError(
            f"{file.path}: tensor {tensor.name}: expected three dimensions, found {list(tensor.shape)}; the file is "
            "damaged: download or convert it again"
        )
    num_experts, num_rows, _ = tensor.shape
    for expert in range(num_experts):
        rows = tensor.data[expert * num_rows : (expert + 1) * num_rows]
        yield dataclasses.replace(tensor, shape=tensor.shape[1:], data=rows)


def _as_row(tensor: GgufTensor) -> GgufTensor:
    """A linear layer of one output, which the converter has stored as a vector."""
    return dataclasses.replace(tensor, shape=(1, tensor.shape[-1]))


def _form(file: GgufFile) -> GgufForm:
    return gguf_form(file.metadata["general.architecture"], _num_experts(file) > 0)


def _num_experts(file: GgufFile) -> int:
    return file.integer(f"{file.metadata['general.architecture']}.expert_count", 0) or 0


def _checkpoint_name(name: str, names: Mapping[str, str]) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; names that are not in `names` stay."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None or match[2] not in names:
        return name
    prefix = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{prefix}{names[match[2]]}.{match[3]}"


def gguf_architecture(file: GgufFile) -> str:
    """Hugging Face class name, or the name in the file for an architecture that we do not implement."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelLoadError(f"{file.path}: metadata key general.architecture is missing: not a language model")
    known = of_gguf(arch, _num_experts(file) > 0)
    return arch if known is None else known.name


def gguf_eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """End of text, and end of turn where the file names one."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    token_ids = (file.integer(key) for key in keys)
    return tuple(dict.fromkeys(token_id for token_id in token_ids if token_id is not None))


def gguf_config(file: GgufFile, dtype: torch.dtype) -> ModelConfig:
    """Translates GGUF metadata into the keys of `config.json` and reads those as for any other model."""
    keys = gguf_config_keys(file)
    try:
        config: ModelConfig = ARCHITECTURES[gguf_architecture(file)].read_config(keys, dtype)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file.path}: {error}") from error
    tensor = file.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return config
    if not isinstance(config, DecoderConfig):
        raise ModelLoadError(
            f"{file.path}: tensor {_ROPE_FACTORS}: {config.architecture} has no rotary positions to scale"
        )
    factors = tuple(_float_vector(file, _ROPE_FACTORS))
    expected = config.rope.rotary_dim(config.head_dim) // 2
    if len(factors) != expected or not all(0 < factor < math.inf for factor in factors):
        raise ModelLoadError(f"{file.path}: tensor {_ROPE_FACTORS}: expected {expected} positive numbers")
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, frequency_factors=factors))


def gguf_config_keys(file: GgufFile) -> dict[str, Any]:
    """What `config.json` would say, of an architecture that we implement. Raises ModelLoadError naming the key."""
    arch = file.metadata["general.architecture"]
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing: not a language model")
    num_layers = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if (block_count := file.integer(f"{arch}.block_count")) != num_layers:
        raise ModelLoadError(f"{file.path}: {arch}.block_count is {block_count}, found tensors of {num_layers} blocks")
    heads = _heads(file)
    window = file.integer(f"{arch}.attention.sliding_window", 0)
    form = _form(file)
    numbers = {key: file.number(f"{arch}.{name}") for name, key in form.numbers.items()}
    keys = {
        "architectures": [gguf_architecture(file)],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": file.positive(f"{arch}.embedding_length"),
        "intermediate_size": file.positive(f"{arch}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "max_position_embeddings": file.positive(f"{arch}.context_length"),
        "rms_norm_eps": file.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(gguf_eos_token_ids(file)),
        "rope_parameters": _rope_keys(file, f"{arch}.rope.", heads.head_dim),
        **_experts_keys(file, arch),
    } | {key: value for key, value in numbers.items() if value is not None}
    return keys if form.derived_keys is None else keys | dict(form.derived_keys(keys))


def _experts_keys(file: GgufFile, arch: str) -> dict[str, Any]:
    if not (num_experts := _num_experts(file)):
        return {}
    size, top_k = file.positive(f"{arch}.feed_forward_length"), file.positive(f"{arch}.expert_used_count")
    return {
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        # What is missing llama.cpp takes so (`llama-model.cpp`, qwen2moe and qwen3moe)
        "moe_intermediate_size": file.positive(f"{arch}.expert_feed_forward_length", size // top_k),
        "shared_expert_intermediate_size": file.positive(f"{arch}.expert_shared_feed_forward_length", size),
    }


class _Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


def _heads(file: GgufFile) -> _Heads:
    arch = file.metadata["general.architecture"]
    num_heads = file.positive(f"{arch}.attention.head_count")
    head_dim = file.positive(f"{arch}.attention.key_length", file.positive(f"{arch}.embedding_length") // num_heads)
    return _Heads(num_heads, file.positive(f"{arch}.attention.head_count_kv", num_heads), head_dim)


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
    if not _LONGROPE_FACTORS.keys().isdisjoint(file.tensors):
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
    if original_length is None or not _LONGROPE_FACTORS.keys() <= file.tensors.keys():
        raise ModelLoadError(
            f"{file.path}: {', '.join(_LONGROPE_FACTORS)} and rope.scaling.original_context_length belong together, "
            "and one is missing; convert the model again"
        )
    factors = {key: _float_vector(file, name) for name, key in _LONGROPE_FACTORS.items()}
    lengths = {"original_max_position_embeddings": int(original_length), "attention_factor": attention_factor}
    return {"rope_type": "longrope"} | lengths | factors


def _float_vector(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if tensor.type is not GGMLQuantizationType.F32:
        raise ModelLoadError(f"{file.path}: tensor {name} is {tensor.type.name}; only F32 is supported")
    values: list[float] = tensor.data.view(np.float32).ravel().tolist()
    return values
