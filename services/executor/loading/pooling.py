"""The task that a model is served for, and its pooling: by flags, and by the files of sentence-transformers.

`modules.json` lists the modules in order: a transformer, a pooling, any number of dense layers, a normalisation.
`config.json` states a classifier's labels and how its logits become scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.config.values import executor as values
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.pooling import Pooler
from pagewire.services.executor.loading.config_file import merged, read_json
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.models.pooling import (
    LAST_STATE,
    PIECEWISE,
    POOLS,
    ClassifierPooler,
    DenseLayer,
    EmbeddingPooler,
    Pooling,
)
from pagewire.services.executor.models.protocol import Classifier, Model

_OLD_MODE = "pooling_mode_"
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
    "torch.nn.modules.activation.GELU": torch.nn.functional.gelu,
    "torch.nn.modules.activation.ReLU": torch.relu,
}


def pooling_of(
    model: Model,
    path: Path,
    runner: str,
    convert: str,
    device: torch.device,
    overrides: Mapping[str, Any] | None = None,
) -> Pooling:
    """Returns the task. path: of the model's files. runner and convert: the flags. overrides: replace keys of
    config.json.

    Raises ModelLoadError for a task that the model cannot be served for.

    runner auto: a generating model is served for text, unless sentence-transformers saved it, or a GGUF file states a
    pooling. convert auto: a classification head is used if there is one. If the pooling is not known either, it is the
    mean of an encoder's states or the last of a decoder's, normalised.
    """
    modules = path / "modules.json"
    architecture, stated = model.config.architecture, model.config.pooling
    makes_vectors = not model.generates or modules.is_file() or stated is not None or convert == "embed"
    if runner == "generate" or (runner == "auto" and not makes_vectors):
        if not model.generates:
            raise ModelLoadError(f"--runner generate: {architecture} generates no text; leave the flag out")
        if refused := values.of_conversion(convert):
            raise ModelLoadError(refused)
        return LAST_STATE
    if convert == "classify" or (convert in ("auto", "none") and model.classifier is not None):
        if model.classifier is None:
            raise ModelLoadError(values.of_classes(architecture))
        return _classifying(model.classifier, path, overrides or {})
    if modules.is_file():
        return _by_modules(model, path, read_modules(modules), device)
    mode = stated or ("lasttoken" if model.generates else "mean")
    pooler = EmbeddingPooler([POOLS[mode]], [], normalizes=True)
    return Pooling("embed", pooler, model.config.hidden_size, whole_prompts=_whole_prompts(model, [mode]))


def _whole_prompts(model: Model, modes: list[str]) -> bool:
    return not model.generates or not set(modes) <= PIECEWISE


def read_modules(file: Path) -> list[Mapping[str, Any]]:
    try:
        content: Any = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON ({error})") from error
    is_list = isinstance(content, list) and all(isinstance(entry, dict) and "type" in entry for entry in content)
    if not is_list:
        raise ModelLoadError(f"{file}: expected a list of modules, each with a type")
    return list(content)


def _by_modules(model: Model, path: Path, modules: list[Mapping[str, Any]], device: torch.device) -> Pooling:
    modes: list[str] = []
    layers: list[DenseLayer] = []
    normalizes = False
    size = model.config.hidden_size
    for module in modules:
        kind, folder = str(module["type"]).rpartition(".")[2], path / str(module.get("path") or "")
        if normalizes and kind != "Normalize":
            raise ModelLoadError(f"{path}/modules.json: {module['type']} follows a normalisation; not supported")
        if kind == "Pooling":
            modes = pooling_modes(folder / "config.json")
            size *= len(modes)
        elif kind == "Dense":
            layers.append(_dense_layer(folder, size, device))
            size = len(layers[-1].weight)
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise ModelLoadError(
                f"{path}/modules.json: {module['type']} is none of Transformer, Pooling, Dense and Normalize"
            )
    if not modes:
        raise ModelLoadError(f"{path}/modules.json: there is no Pooling; add its module, or remove modules.json")
    return Pooling(
        "embed",
        EmbeddingPooler([POOLS[mode] for mode in modes], layers, normalizes=normalizes),
        size,
        whole_prompts=_whole_prompts(model, modes),
        max_model_len=max_seq_length(path),
    )


def pooling_modes(file: Path) -> list[str]:
    """Names in POOLS. Raises ModelLoadError for a mode that is not known."""
    config = read_json(file)
    if config.get("include_prompt") is False:
        raise ModelLoadError(f"{file}: include_prompt false (a prompt that is not pooled) is not supported")
    stated = config.get("pooling_mode")
    if stated is None:  # one key for each mode, as sentence-transformers wrote them before version 6
        stated = [_OLD_MODES.get(key, key) for key, value in config.items() if key.startswith(_OLD_MODE) and value]
    modes = stated if isinstance(stated, list) else [stated]
    if not modes or not all(isinstance(mode, str) and mode in POOLS for mode in modes):
        raise ModelLoadError(f"{file}: pooling modes {modes} are not among {', '.join(POOLS)}")
    return [mode for mode in POOLS if mode in modes]


def max_seq_length(path: Path) -> int | None:
    """Returns the limit of `sentence_bert_config.json`: sentence-transformers reads no more of a text."""
    file = path / "sentence_bert_config.json"
    length = read_json(file).get("max_seq_length") if file.is_file() else None
    if length is not None and (not isinstance(length, int) or length < 2):
        raise ModelLoadError(f"{file}: max_seq_length: expected a number of tokens, found {length!r}")
    return length


def _dense_layer(folder: Path, size: int, device: torch.device) -> DenseLayer:
    config = read_json(folder / "config.json")
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = _activation(folder / "config.json", "activation_function", name)
    source = SafetensorsSource(folder)
    weight = source.shapes.get("linear.weight", ())
    if weight[1:] != (size,) or source.shapes.get("linear.bias", weight[:1]) != weight[:1]:
        raise ModelLoadError(
            f"{folder}: expected linear.weight with {size} inputs, and as many elements of linear.bias as it has "
            f"outputs, found {source.shapes}"
        )
    tensors = {name: source.raw(name).to(device, torch.float32) for name in source.shapes}
    return DenseLayer(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def _activation(file: Path, key: str, name: Any) -> Callable[[Tensor], Tensor]:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelLoadError(f"{file}: {key} {name!r:.100} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _classifying(classifier: Classifier, path: Path, overrides: Mapping[str, Any]) -> Pooling:
    file = path / "config.json"
    config = merged(read_json(file) if file.is_file() else {}, overrides)  # a GGUF file has none
    names = _object(path, config, "id2label")
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(classifier.num_labels))
    pooler: Pooler = ClassifierPooler(classifier, _score_activation(config, classifier.num_labels, path))
    return Pooling("classify", pooler, classifier.num_labels, labels, whole_prompts=True)


def _score_activation(config: Mapping[str, Any], num_labels: int, path: Path) -> Callable[[Tensor], Tensor]:
    """Returns the activation of a cross-encoder's config, else the one for `problem_type` and the number of labels."""
    named = _object(path, config, "sentence_transformers").get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        return _activation(path / "config.json", "activation", named)
    problem = config.get("problem_type")
    if problem == "regression":
        return lambda logits: logits
    is_single = problem == "single_label_classification" or (problem is None and num_labels > 1)
    return (lambda logits: logits.softmax(-1)) if is_single else torch.sigmoid


def _object(path: Path, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"{path}/config.json: key {key}: expected an object, found {value!r:.100}")
    return value
