"""Adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from pagewire.files.damaged_file import remedy
from pagewire.services.executor.adapters.low_rank import (
    AdapterError,
    AdapterFiles,
    LowRank,
    Stack,
    checked_factors,
    checked_module,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_LONGEST_NAME = 200  # of a module
_MAX_BYTES = 16 << 30  # of the weights; the largest adapters of the largest models are a tenth of that
_MAX_CONFIG_BYTES = 1 << 20
# Keys of `rank_pattern` and `alpha_pattern` that are matched in little time, whatever a module is called: literals,
# digits, any text, and alternatives of literals, each not too often.
_PATTERN = re.compile(r"\^?(?:[\w/-]|\\\.|\.\*|\.(?!\*)|\\d\+?|\[0-9\]\+?|\((?:\?:)?(?:[\w|-]|\\?\.)+\))*\$?")
_MAX_PATTERNS, _MAX_PATTERN_CHARS, _MAX_USES = 1000, 300, {"(": 3, "|": 16, "*": 2, "+": 2}
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")
# A module with parameters that have a weight for each expert, and what wraps it once for each parameter.
_EXPERTS = re.compile(r"(?P<module>(?:.+\.)?experts)(?:\.base_layer)*")
_MERGE = "merge it into its model (peft: merge_and_unload) and serve that"

# Keys of the config that change what is computed -> what they are. An adapter that sets one of them is refused.
_REFUSED = {
    "use_dora": "it is a DoRA, which also scales the model's own weights",
    "modules_to_save": "it replaces whole modules of the model",
    "lora_bias": "it adds biases",
    "fan_in_fan_out": "its model stores weights transposed",
    "layer_replication": "it repeats layers of the model",
    "trainable_token_indices": "it changes rows of the embedding",
    "alora_invocation_tokens": "it is an activated LoRA, which begins to count at certain tokens",
    "use_qalora": "it is a QALoRA, which pools its inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "arrow_config": "it routes tokens between adapters",
}
# Values of init_lora_weights with which training starts from changed weights of the model.
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_peft(path: Path) -> AdapterFiles:
    """Reads a folder. Raises AdapterError."""
    raw_config = _bytes(path / CONFIG, _MAX_CONFIG_BYTES)
    config = _config(path / CONFIG, raw_config)
    raw = _weights(path)
    tensors = _tensors(path / WEIGHTS, raw)
    digest = hashlib.sha256(b"%d\n" % len(raw_config) + raw_config)
    digest.update(raw)
    modules, stacks = _modules(path / WEIGHTS, config, tensors)
    return AdapterFiles(digest.hexdigest(), config.base_model, modules, stacks)


@dataclass(frozen=True)
class _Config:
    """The keys that say how an adapter's weights are applied."""

    base_model: str
    rank: int
    alpha: float
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    by_root: bool  # the scale is alpha / sqrt(rank)
    parameters: tuple[str, ...]  # ends of the names of those that are changed themselves, not as weights of modules

    def key_of(self, module: str) -> str:
        """Returns the name of a linear layer for the functions below."""
        weight = f".{module}.weight"
        return weight[1:] if any(weight.endswith(f".{name}") for name in self.parameters) else module

    def terms_of(self, name: str, within: str = "") -> tuple[int, float]:
        """Returns rank and scale."""
        name = f"{within}.{name}" if within else name
        return self.rank_of(name), self.scale_of(name)

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks.items() if pattern.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        alpha = next((alpha for pattern, alpha in self.alphas.items() if pattern.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _config(path: Path, raw: bytes) -> _Config:
    try:
        keys = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not JSON ({error!s:.200}); {remedy(path)}") from error
    if not isinstance(keys, dict):
        raise AdapterError(f"{path}: expected a JSON object; {remedy(path)}")
    _check_kind(path, keys)
    base_model = keys.get("base_model_name_or_path")
    if not isinstance(by_root := keys.get("use_rslora") or False, bool):
        raise _wrong(path, "use_rslora", "true or false", by_root)
    return _Config(
        base_model if isinstance(base_model, str) else "",
        _rank(path, "r", keys.get("r")),
        _alpha(path, "lora_alpha", keys.get("lora_alpha")),
        {pattern: _rank(path, f"rank_pattern.{key}", value) for pattern, key, value in _patterns(path, keys, "rank")},
        {
            pattern: _alpha(path, f"alpha_pattern.{key}", value)
            for pattern, key, value in _patterns(path, keys, "alpha")
        },
        by_root,
        _parameters(path, keys.get("target_parameters") or ()),
    )


def _parameters(path: Path, names: object) -> tuple[str, ...]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _wrong(path, "target_parameters", "a list of names", names)
    if len(names) > _MAX_PATTERNS:
        raise AdapterError(f"{path}: target_parameters has {len(names)} names, of at most {_MAX_PATTERNS}; join some")
    return tuple(names)


def _check_kind(path: Path, keys: Mapping[str, Any]) -> None:
    """Raises AdapterError unless the adapter is a LoRA of linear layers, and nothing else."""
    kind = keys.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{path}: peft_type is {kind!r:.100}, expected 'LORA', the only kind that is served; {_MERGE}"
        )
    for key, reason in _REFUSED.items():
        if keys.get(key):
            raise AdapterError(f"{path}: {key} is set: {reason}, which is not served; {_MERGE}")
    if (bias := keys.get("bias", "none")) != "none":
        raise AdapterError(f"{path}: bias is {bias!r:.100}, expected 'none': biases are not served; {_MERGE}")
    initial = keys.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_MODEL):
        raise AdapterError(
            f"{path}: init_lora_weights is {initial!r:.100}: the adapter belongs to a model with changed weights; save "
            "it with path_initial_model_for_weight_conversion, which makes it one of the original model"
        )


def _rank(path: Path, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(path, key, "a positive whole number", value)
    return value


def _alpha(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise _wrong(path, key, "a number", value)
    return float(value)


def _patterns(path: Path, keys: Mapping[str, Any], kind: str) -> list[tuple[re.Pattern[str], str, object]]:
    """Returns (pattern, key, value) of `rank_pattern` or `alpha_pattern`: PEFT takes the first that matches a module's
    name to its end, from a dot on."""
    stated = keys.get(f"{kind}_pattern") or {}
    if not isinstance(stated, dict):
        raise _wrong(path, f"{kind}_pattern", "an object", stated)
    if len(stated) > _MAX_PATTERNS:
        raise AdapterError(f"{path}: {kind}_pattern has {len(stated)} keys, of at most {_MAX_PATTERNS}; join some")
    found = []
    for key, value in stated.items():
        is_bounded = len(key) <= _MAX_PATTERN_CHARS and all(key.count(char) <= most for char, most in _MAX_USES.items())
        if not is_bounded or _PATTERN.fullmatch(key) is None:
            raise AdapterError(
                f"{path}: {kind}_pattern has {key!r:.100}; what is read are names with a few .*, \\d+ and (a|b): "
                "name the modules so"
            )
        found.append((re.compile(rf"(.*\.)?({key})$"), key, value))
    return found


def _wrong(path: Path, key: str, expected: str, found: object) -> AdapterError:
    return AdapterError(
        f"{path}: {key:.100}: expected {expected}, found {found!r:.100}; correct it as it was in training"
    )


def _weights(path: Path) -> bytes:
    if (path / WEIGHTS).is_file():
        return _bytes(path / WEIGHTS, _MAX_BYTES)
    if (path / "adapter_model.bin").is_file():
        source, target = str(path / "adapter_model.bin"), str(path / WEIGHTS)
        code = (
            f"import torch, safetensors.torch as s; s.save_file({{k: v.contiguous() for k, v in "
            f"torch.load({source!r}, map_location='cpu', weights_only=True).items()}}, {target!r})"
        )
        raise AdapterError(
            f"{path}: no {WEIGHTS}, and adapter_model.bin, which may hold code, is not read; convert it once: python "
            f"-c {shlex.quote(code)}"
        )
    raise AdapterError(f"{path}: {WEIGHTS} is missing; download the adapter again, with all of its files")


def _bytes(path: Path, limit: int) -> bytes:
    """Returns a file's contents, so that what was hashed is what is used."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise AdapterError(f"{path}: has {size} bytes, more than the {limit} of any adapter; name an adapter")
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(
            f"{path}: cannot be read ({error.strerror or error}); see to its permissions and the disk"
        ) from error


def _tensors(path: Path, raw: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(raw)
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise AdapterError(f"{path}: truncated or not a safetensors file ({error!s:.200}); {remedy(path)}") from error


def _modules(path: Path, config: _Config, tensors: Mapping[str, Tensor]) -> tuple[dict[str, LowRank], dict[str, Stack]]:
    modules, stacks = dict[str, LowRank](), dict[str, Stack]()
    for module, pair in _sides(path, tensors).items():
        if len(pair) != 2:
            missing = "AB".replace(next(iter(pair)), "")
            raise AdapterError(f"{path}: {module:.200} has no lora_{missing}; {remedy(path)}")
        if (of_experts := _EXPERTS.fullmatch(module)) is not None:
            inner = of_experts["module"]
            factors = checked_factors(str(path), module, pair["A"], pair["B"])
            stacks[module] = Stack(inner, *factors, partial(config.terms_of, within=inner))
            continue
        rank, scale = config.terms_of(config.key_of(module))
        modules[module] = found = checked_module(str(path), module, pair["A"], pair["B"], scale)
        if found.rank != rank:
            raise AdapterError(
                f"{path}: {module:.200} has rank {found.rank}, {CONFIG} says {rank}; the two files must come from the "
                "same training"
            )
    return modules, stacks


def _sides(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns "A" and "B" by module."""
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"{path}: tensor {name:.200} {_why_not(name)}; {_MERGE}")
        module = match["module"].removeprefix("base_model.model.")
        if len(module) > _LONGEST_NAME or match["side"] in sides.setdefault(module, {}):
            raise AdapterError(
                f"{path}: tensor {name:.200} names no module, or one that has a lora_{match['side']} already; save one "
                "adapter to a folder of its own"
            )
        sides[module][match["side"]] = tensor
    if not sides:
        raise AdapterError(f"{path}: it has no tensors; save the adapter again after training")
    return sides


def _why_not(name: str) -> str:
    if "lora_embedding" in name:
        return "changes the embedding, to which adapters are not applied"
    if "lora_magnitude_vector" in name:
        return "is of a DoRA, which is not served"
    if name.endswith(".bias"):
        return "is a bias; biases of adapters are not served"
    return "is no lora_A or lora_B of a linear layer, and nothing else is served"
