"""Names: llama.cpp's names of tensors and ours, and the orders of rows in which its converter stores projections."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.row_order import qkv_apart
from pagewire.services.executor.loading.weights.gguf_file import GgufFile, GgufTensor
from pagewire.services.executor.models.architecture import GgufForm
from pagewire.services.executor.models.registry import gguf_form

_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+(?:\.output)?)(?:\.(weight|bias))?")

ROPE_FACTORS = "rope_freqs.weight"
# LongRoPE's factors -> their key in config.json
LONGROPE_FACTORS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


def heads_of(file: GgufFile) -> Heads:
    """Raises ModelLoadError naming the key."""
    arch = file.metadata["general.architecture"]
    num_heads = file.positive(f"{arch}.attention.head_count")
    head_dim = file.positive(f"{arch}.attention.key_length", file.positive(f"{arch}.embedding_length") // num_heads)
    return Heads(num_heads, file.positive(f"{arch}.attention.head_count_kv", num_heads), head_dim)


def form_of(file: GgufFile) -> GgufForm:
    return gguf_form(file.metadata["general.architecture"], file.stated)


class RowOrders:
    """The rows of tensors that the converter has put into another order than the checkpoint's."""

    def __init__(self, file: GgufFile) -> None:
        form = form_of(file)
        self._interleaved = form.interleaved_rotary
        self._fused = form.qkv_apart
        self._heads = heads_of(file) if form.interleaved_rotary or form.qkv_apart else None

    def of(self, name: str) -> np.ndarray | None:
        """Returns int64: the checkpoint's row -> row in the file; None: the same."""
        if self._heads is None:
            return None
        if self._fused and ".query_key_value." in name:
            return np.argsort(qkv_apart(*self._heads).numpy())
        if self._interleaved and ".q_proj." in name:
            return file_rows(self._heads.num_heads, self._heads.head_dim)
        if self._interleaved and ".k_proj." in name:
            return file_rows(self._heads.num_kv_heads, self._heads.head_dim)
        return None


def file_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """int64 [num_heads * head_dim]: model row -> file row of a q or k projection of the llama architecture.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... of a head where we rotate (0, d/2), (1, d/2 + 1), ...,
    so that model row s * d/2 + j of a head is file row 2j + s. Example, head_dim 6: [0, 2, 4, 1, 3, 5].
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def named_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """Returns the model's tensors, by the names of a Hugging Face checkpoint."""
    form = form_of(file)
    named: dict[str, GgufTensor] = {}
    for stored_name, tensor in file.tensors.items():
        name = _checkpoint_name(stored_name, form)
        if isinstance(name, tuple):
            named |= dict(zip(name, _heads_apart(file, tensor), strict=True))
        elif "{}" in name:
            named |= {name.format(expert): part for expert, part in enumerate(_experts_apart(file, tensor))}
        elif name != ROPE_FACTORS and name not in LONGROPE_FACTORS:
            named[name] = _as_row(tensor) if name.endswith("shared_expert_gate.weight") else _shaped(tensor, name, form)
    return named


def _shaped(tensor: GgufTensor, name: str, form: GgufForm) -> GgufTensor:
    shape = next((shape for end, shape in form.shapes.items() if name.endswith(end)), None)
    return tensor if shape is None else dataclasses.replace(tensor, shape=shape(tensor.shape))


def _checkpoint_name(name: str, form: GgufForm) -> str | tuple[str, ...]:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; names that the form does not know stay."""
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        return name
    layer, module, suffix = match.groups()
    prefix = "" if layer is None else f"{form.layers}.{layer}."
    whole = form.names.get(module if suffix is None else f"{module}.{suffix}")
    if whole is not None:
        return f"{prefix}{whole}"
    modules = None if suffix is None else form.names.get(module)
    if isinstance(modules, tuple):
        return tuple(f"{prefix}{part}.{suffix}" for part in modules)
    return name if modules is None else f"{prefix}{modules}.{suffix}"


def _experts_apart(file: GgufFile, tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Of each expert, of a tensor that has all experts one behind the other."""
    expected = 2 if tensor.name.endswith(".bias") else 3
    if len(tensor.shape) != expected:
        raise ModelLoadError(
            f"{file.path}: tensor {tensor.name}: expected {expected} dimensions, found {list(tensor.shape)}; the file "
            "is damaged: download or convert it again"
        )
    for expert in range(tensor.shape[0]):
        yield dataclasses.replace(_rows(file, tensor, expert, expert + 1), shape=tensor.shape[1:])


def _heads_apart(file: GgufFile, tensor: GgufTensor) -> Iterator[GgufTensor]:
    """All queries, all keys and all values of a tensor that has them one behind the other."""
    heads = heads_of(file)
    q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    if tensor.shape[0] != q_size + 2 * kv_size:
        raise ModelLoadError(
            f"{file.path}: tensor {tensor.name}: expected {q_size + 2 * kv_size} rows, found {list(tensor.shape)}; the "
            "file is damaged: download or convert it again"
        )
    for start, size in ((0, q_size), (q_size, kv_size), (q_size + kv_size, kv_size)):
        yield _rows(file, tensor, start, start + size)


def _rows(file: GgufFile, tensor: GgufTensor, start: int, stop: int) -> GgufTensor:
    """Of the outermost dimension."""
    shape = (stop - start, *tensor.shape[1:])
    if len(shape) > 1:
        inner = math.prod(shape[1:-1])
        return dataclasses.replace(tensor, shape=shape, data=tensor.data[start * inner : stop * inner])
    block, size = GGML_QUANT_SIZES[tensor.type]
    if block > 1:
        raise ModelLoadError(
            f"{file.path}: tensor {tensor.name} is {tensor.type.name}, a vector in blocks; convert the model again"
        )
    return dataclasses.replace(tensor, shape=shape, data=tensor.data[:, start * size : stop * size])


def _as_row(tensor: GgufTensor) -> GgufTensor:
    """A linear layer of one output, which the converter has stored as a vector."""
    return dataclasses.replace(tensor, shape=(1, tensor.shape[-1]))
