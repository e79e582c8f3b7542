"""Adapters as llama.cpp's `convert_lora_to_gguf.py` writes them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from pagewire.services.executor.adapters.low_rank import AdapterError, AdapterFiles, LowRank, checked_module
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.weights.gguf_file import GgufFile, GgufTensor
from pagewire.services.executor.loading.weights.gguf_names import file_rows
from pagewire.services.executor.models.architecture import GgufForm
from pagewire.services.executor.models.registry import gguf_form

_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<module>\w+)\.weight\.lora_(?P<side>[ab])")
_STORED = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
_PEFT = "serve the folder that it was converted from, which PEFT wrote"


def read_gguf(path: Path, heads: tuple[int, int] | None) -> AdapterFiles:
    """Reads a file. heads: the model's query heads and KV heads. Raises AdapterError.

    Where llama.cpp has another order of a model's queries and keys, that of an adapter's `up` follows from the heads.
    """
    try:
        file = GgufFile(path)
        kind, what = file.text("general.type", "model"), file.text("adapter.type", "")
        alpha = file.metadata.get("adapter.lora.alpha")
        architecture = file.text("general.architecture", "")
        base_model = file.text("general.base_model.0.name", "")
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    if (kind, what) != ("adapter", "lora"):
        raise AdapterError(
            f"{path}: general.type is {kind!r:.100} and adapter.type {what!r:.100}, expected 'adapter' and 'lora'; "
            "convert the adapter with llama.cpp's convert_lora_to_gguf.py"
        )
    if any(key.startswith("adapter.alora.") for key in file.metadata):
        raise AdapterError(f"{path}: it is an activated LoRA, which is not served; merge it into its model")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
        raise AdapterError(f"{path}: adapter.lora.alpha: expected a number, found {alpha!r:.100}; {_PEFT}")
    digest = hashlib.sha256(f"{architecture}\n{alpha}\n".encode())
    form = gguf_form(architecture, file.stated)
    sides = _sides(path, file, form, digest)
    modules = {}
    for module, pair in sides.items():
        if len(pair) != 2:
            raise AdapterError(f"{path}: {module:.200} has no lora_{'ab'.replace(next(iter(pair)), '')}; {_PEFT}")
        down, up = pair["a"], pair["b"]
        up = _in_order(path, module, up, form, heads)
        if "{}" not in module:
            modules[module] = _module(path, module, down, up, float(alpha))
            continue
        if down.dim() != 3 or up.dim() != 3 or len(down) != len(up):
            raise AdapterError(
                f"{path}: {module:.200} has the shapes {list(down.shape)} and {list(up.shape)}, expected [experts, "
                f"rank, inputs] and [experts, outputs, rank]; {_PEFT}"
            )
        for expert, factors in enumerate(zip(down, up, strict=True)):
            modules[module.format(expert)] = _module(path, module.format(expert), *factors, float(alpha))
    if not modules:
        raise AdapterError(f"{path}: it has no tensors; convert the adapter again")
    return AdapterFiles(digest.hexdigest(), base_model, modules)


def _module(path: Path, name: str, down: Tensor, up: Tensor, alpha: float) -> LowRank:
    # As llama.cpp has it: without an alpha nothing is scaled.
    return checked_module(str(path), name, down, up, alpha / down.shape[0] if alpha else 1.0)


def _sides(path: Path, file: GgufFile, form: GgufForm, digest: hashlib._Hash) -> dict[str, dict[str, Tensor]]:
    """Returns "a" and "b" by the checkpoint's name of a module; hashes what it reads."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(file.tensors.items()):
        match = _TENSOR.fullmatch(name)
        module = None if match is None else form.names.get(match["module"])
        if match is None or not isinstance(module, str):
            raise AdapterError(
                f"{path}: tensor {name:.200} is not of a linear layer with a name in the checkpoint; serve the adapter "
                "as PEFT wrote it, or merge it into its model"
            )
        digest.update(f"{name} {tensor.type.name} {list(tensor.shape)}\n".encode())
        sides.setdefault(f"{form.layers}.{match['layer']}.{module}", {})[match["side"]] = _numbers(path, tensor, digest)
    return sides


def _numbers(path: Path, tensor: GgufTensor, digest: hashlib._Hash) -> Tensor:
    """Returns a copy of the values, which what becomes of the file does not change."""
    data = tensor.data.copy()
    digest.update(data.data)
    if tensor.type in _STORED:
        return torch.from_numpy(data).view(_STORED[tensor.type]).view(tensor.shape)
    if tensor.type is GGMLQuantizationType.BF16:
        return torch.from_numpy(data).view(torch.bfloat16).view(tensor.shape)
    try:
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is refused later
            return torch.from_numpy(dequantize(data, tensor.type)).view(tensor.shape)
    except NotImplementedError as error:
        raise AdapterError(
            f"{path}: tensor {tensor.name} has type {tensor.type.name}, which cannot be dequantized; convert the "
            "adapter with --outtype f16"
        ) from error


def _in_order(path: Path, module: str, up: Tensor, form: GgufForm, heads: tuple[int, int] | None) -> Tensor:
    """Returns `up` with rows in the checkpoint's order; llama.cpp's converter orders those of an adapter as it does
    those of the model's weight (`gguf_names.RowOrders`)."""
    index = {"q_proj": 0, "k_proj": 1}.get(module.rpartition(".")[2])
    if form.qkv_apart and module.endswith("query_key_value"):
        raise AdapterError(f"{path}: {module} has the order of rows that llama.cpp gives it; {_PEFT}")
    if not form.interleaved_rotary or index is None:
        return up
    if heads is None or up.shape[0] % (2 * heads[index]):
        raise AdapterError(
            f"{path}: {module} has {up.shape[0]} rows, which are not those of the model's heads; {_PEFT}"
        )
    return up[torch.from_numpy(file_rows(heads[index], up.shape[0] // heads[index]))]
