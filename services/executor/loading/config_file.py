"""`config.json` in all its forms: with overrides, without a class name, with old and new names of dtypes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pagewire.files.json_file import read_json_object
from pagewire.services.executor.config.load_error import ModelLoadError
from pagewire.services.executor.models.registry import ARCHITECTURES

_OF_THE_WHOLE = ("architectures", "model_type")  # keys that parts have, too

_NAME_IT = """name it: --hf-overrides '{"architectures": ["LlamaForCausalLM"]}'"""


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Returns the value of `--hf-overrides`."""
    if not text:
        return {}
    try:
        overrides = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"--hf-overrides: {text!r:.200} is not JSON ({error})") from error
    if not isinstance(overrides, dict):
        raise ModelLoadError(f"--hf-overrides: expected a JSON object with keys of config.json, found {text!r:.200}")
    return overrides


def merged(keys: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `keys` with `overrides` applied at every level."""
    result = dict(keys)
    for key, value in overrides.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `raw` with `--hf-overrides`: keys of `text_config` are overridden there, as it precedes
    the top level."""
    nested = raw.get("text_config")
    if "hidden_size" in raw or not isinstance(nested, Mapping):
        return merged(raw, overrides)
    inner = {key: value for key, value in overrides.items() if key in nested and key not in _OF_THE_WHOLE}
    outer = {key: value for key, value in overrides.items() if key in raw or key not in inner}
    return merged(merged(raw, {"text_config": inner}), outer)


def text_keys(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of the language model, which models of several parts keep in `text_config`."""
    nested = raw.get("text_config")
    if "hidden_size" in raw or not isinstance(nested, Mapping):
        return raw
    return {**raw, **nested, "architectures": raw.get("architectures")}


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Returns the class in `architectures`, otherwise the class for `model_type`."""
    names = raw.get("architectures") or []
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    if names:
        raise ModelLoadError(f"key architectures must name one class, found {names!r:.200}; {_NAME_IT}")
    model_type = raw.get("model_type")
    for known in ARCHITECTURES.values():
        if known.model_type == model_type:
            return known.name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # costs seconds

    if isinstance(model_type, str) and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    raise ModelLoadError(
        f"key architectures must name one class, found {names}, and no class is known for model_type {model_type!r}; "
        + _NAME_IT
    )


def dtype_of(raw: Mapping[str, Any]) -> torch.dtype | None:
    """`dtype` (transformers 5) or `torch_dtype` (before), with or without "torch." in front; None if there is none."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None or name == "auto":
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ModelLoadError(f"key dtype: {name!r} is not a torch dtype")
    return dtype


def read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
