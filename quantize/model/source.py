"""The model to quantize: its weights, and the files that go with the quantized one."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from pagewire.errors import StartupError
from pagewire.files.gguf import GgufError
from pagewire.files.json_file import read_json_object
from pagewire.files.sampling_defaults.defaults import GENERATION_CONFIG, KEYS, defaults_of_model
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.executor.config.model_config import DecoderConfig
from pagewire.services.executor.loading.checkpoint import (
    Checkpoint,
    DirectoryCheckpoint,
    open_checkpoint,
)
from pagewire.services.executor.loading.loader import resolve_dtype
from pagewire.services.executor.loading.weights.gguf_config import gguf_config_keys
from pagewire.services.executor.loading.weights.gguf_file import GgufFile
from pagewire.services.executor.models.registry import ARCHITECTURES

logger = logging.getLogger(__name__)

_UNQUANTIZED = {"F32", "F16", "BF16", "F64"}
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_WRITTEN_ANEW = ("config.json", "model.safetensors.index.json", "quantization_report.json")


class Source:
    """A model that can be quantized. Raises StartupError with the reason if it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = open_checkpoint(path, "auto")
        known = {name: architecture for name, architecture in ARCHITECTURES.items() if architecture.quantizable}
        if self.checkpoint.architecture not in known:
            raise StartupError(
                f"{path}: architecture {self.checkpoint.architecture} cannot be quantized; {', '.join(known)} can"
            )
        self.keys = self._config_keys(self.checkpoint)
        if "quantization_config" in self.keys:
            method = (self.keys["quantization_config"] or {}).get("quant_method")
            raise StartupError(f"{path}: already quantized ({method}); give the original model in 16 or 32 bits")
        self.dtype: torch.dtype = resolve_dtype("auto", self.checkpoint.dtype)
        config = self.checkpoint.config(self.dtype)
        assert isinstance(config, DecoderConfig)
        self.config = config
        if self.config.rope.frequency_factors is not None:
            raise StartupError(
                f"{path}: tensor rope_freqs.weight holds position scaling that config.json cannot express; quantize "
                "the original model, a directory in Hugging Face layout"
            )
        self.keys["dtype"] = str(self.dtype).removeprefix("torch.")
        self.keys.pop("torch_dtype", None)
        self.tokenizer = self._load_tokenizer()

    def _config_keys(self, checkpoint: Checkpoint) -> dict[str, Any]:
        if isinstance(checkpoint, DirectoryCheckpoint):
            return dict(checkpoint.keys)
        file = GgufFile(checkpoint.path)
        if types := sorted({tensor.type.name for tensor in file.tensors.values()} - _UNQUANTIZED):
            logger.warning(
                "%s is already quantized (%s), and quantizing it again loses more; give the original model in 16 bits",
                checkpoint.path.name,
                ", ".join(types),
            )
        keys = gguf_config_keys(file)
        if not keys["sliding_window"]:
            for key in ("sliding_window", "use_sliding_window", "max_window_layers"):
                del keys[key]
        return keys | {"model_type": ARCHITECTURES[checkpoint.architecture].model_type, "hidden_act": "silu"}

    def _load_tokenizer(self) -> LoadedTokenizer:
        try:
            return load_tokenizer(self.checkpoint.path)
        except (ValueError, GgufError) as error:
            raise StartupError(f"the tokenizer cannot be loaded: {error}") from error

    def eos_token_id(self) -> int | None:
        token = self.tokenizer.special_tokens.get("eos_token")
        return None if token is None else self.tokenizer.backend.token_to_id(token)

    def write_files(self, directory: Path, quantization_config: dict[str, Any]) -> None:
        """Writes all files except weights and report."""
        _write_json(directory / "config.json", self.keys | {"quantization_config": quantization_config})
        if isinstance(self.checkpoint, DirectoryCheckpoint):
            for pattern in _COPIED:
                for file in self.checkpoint.path.glob(pattern):
                    if file.name not in _WRITTEN_ANEW:
                        shutil.copyfile(file, directory / file.name)
        else:
            self._write_tokenizer(directory)
        self._write_generation_config(directory / GENERATION_CONFIG)

    def _write_tokenizer(self, directory: Path) -> None:
        tokenizer = self.tokenizer
        tokenizer.backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            **tokenizer.special_tokens,
        }
        if tokenizer.chat_template is not None:
            config["chat_template"] = tokenizer.chat_template
        _write_json(directory / "tokenizer_config.json", config)

    def _write_generation_config(self, file: Path) -> None:
        """Adds the sampling that requests get by default: the model may be recognized by its name, which changes."""
        given = read_json_object(file) if file.is_file() else self._generation_config()
        defaults = defaults_of_model(self.path.name, self.checkpoint.path)
        written = defaults.values.keys() - defaults.unless_greedy  # which the file cannot tell apart
        sampling = {key: defaults.values[name] for key, name in KEYS.items() if name in written}
        if sampling.keys() - given.keys():  # transformers rejects them without this key
            given = {"do_sample": sampling.get("temperature") != 0} | given
        if given or sampling:
            _write_json(file, given | sampling)

    def _generation_config(self) -> dict[str, Any]:
        if isinstance(self.checkpoint, DirectoryCheckpoint):
            return {}
        tokens = self.tokenizer.special_tokens
        named = {
            f"{name}_token_id": self.tokenizer.backend.token_to_id(tokens[f"{name}_token"])
            for name in ("bos", "pad")
            if f"{name}_token" in tokens
        }
        return named | {"eos_token_id": list(self.config.eos_token_ids)}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
