"""Adapters for tests, in PEFT's form, and models into which they are merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
DENSE = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def save_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 4,
    names: Sequence[str] = DENSE,
    seed: int = 0,
    alpha: float = 8.0,
    spread: float = 0.3,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a random adapter of those layers of a saved model with names that end as `names`; returns its path."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.endswith(tuple(names)):
            outputs, inputs = weight.shape
            down = spread * torch.randn(rank, inputs, generator=generator)
            up = spread * torch.randn(outputs, rank, generator=generator)
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    keys = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny/base",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [name.rpartition(".")[2] for name in names],
        "bias": "none",
        **(config or {}),
    }
    (path / "adapter_config.json").write_text(json.dumps(keys))
    return path


def merged(path: Path, model: Path, adapter: Path) -> Path:
    """Writes the model with the adapter added to its weights, which is what requests with the adapter compute."""
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            weight = weights[f"{module}.weight"]
            scale = config["lora_alpha"] / config["r"]
            weights[f"{module}.weight"] = (weight.float() + scale * up.float() @ down.float()).to(weight.dtype)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


# Names of a mixture's projections within "experts.N": gate, up, down
EXPERTS = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}


def save_stacked(path: Path, merged_path: Path, model: Path, *, rank: int = 3, alpha: float = 6.0) -> Path:
    """Writes a random adapter of a mixture's experts, router and queries as PEFT does for parameters that have all
    experts, and the model with its weights changed by PEFT's formula; returns the adapter's path."""
    path.mkdir()
    shutil.copytree(model, merged_path)
    generator, scale = torch.Generator().manual_seed(3), alpha / rank
    weights, tensors = load_file(model / "model.safetensors"), dict[str, torch.Tensor]()
    routers = [name for name in weights if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))]

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    for router in routers:
        layer, block = router.removesuffix(".gate.weight").rsplit(".", 1)
        names = [f"{layer}.{block}.experts.{{}}.{name}.weight" for name in EXPERTS[block]]
        count, hidden = weights[router].shape
        inner = len(weights[names[0].format(0)])
        shapes = {"experts.base_layer": (count, hidden, 2 * inner), "experts": (count, inner, hidden)}
        for module, (number, inputs, outputs) in {**shapes, "gate": (1, hidden, count)}.items():
            down, up = random(number * rank, inputs), random(outputs, rank * number)
            key = f"base_model.model.{layer}.mlp.{module}"
            tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
            split = up.reshape(outputs, rank, number), down.reshape(number, rank, inputs)
            changes = scale * torch.einsum("o r e, e r i -> e o i", *split)
            if module == "gate":
                weights[router] += changes[0]
                continue
            changed = names[2:] if module == "experts" else names[:2]
            for expert, change in enumerate(changes):
                for name, part in zip(changed, change.chunk(len(changed)), strict=True):
                    weights[name.format(expert)] += part
    save_file(weights, merged_path / "model.safetensors", {"format": "pt"})
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    keys = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(keys))
    return path
