"""The models of `python -m benchmarks.peers`, in the form that each contestant reads; made once, in a cache folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu.engine import real_checkpoint
from benchmarks.peers.rows import NUM_ADAPTERS
from pagewire.config import DEFAULT_MODEL
from pagewire.errors import StartupError
from pagewire.files.models import resolve_model

REPOSITORY = Path(__file__).parents[2]
RANK = 16  # of adapters
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
# Qwen3's smallest shape, with the default model's vocabulary.
QWEN3_SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 49_152,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _real() -> PreTrainedModel:
    return real_checkpoint.dense(resolve_model(DEFAULT_MODEL))


def _random_qwen3() -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**QWEN3_SHAPE))
    return model.bfloat16()


@dataclass(frozen=True)
class Model:
    """A model. stored: its name as `pagewire serve` takes it, for a model that is stored in 4 bits; "": made here.

    is_trained: whether what it says makes sense, so that drafts can be right. slow_rows: those that take minutes, or
    another server of the same peer, and are measured only if --rows names them.
    """

    key: str
    title: str
    make: Callable[[], PreTrainedModel] = field(repr=False)
    stored: str = ""
    is_trained: bool = False
    slow_rows: frozenset[str] = frozenset()


_ADAPTERS = frozenset(["lora-8", "lora-32"])
MODELS = {
    model.key: model
    for model in (
        Model("default", "SmolLM2-135M-Instruct", _real, DEFAULT_MODEL, is_trained=True, slow_rows=_ADAPTERS),
        Model(
            "qwen3-0.5b",
            "Qwen3's shape, 0.49 B random weights",
            _random_qwen3,
            slow_rows=_ADAPTERS | {"streams-32", "streams-64"},
        ),
    )
}


@dataclass(frozen=True)
class Files:
    """A model's files in the cache. Each is made when it is first asked for."""

    model: Model
    cache: Path

    def checkpoint(self) -> Path:
        """Returns the folder with safetensors in bf16 and the tokenizer."""
        return self._made("checkpoint", self._write_checkpoint)

    def adapters(self) -> list[Path]:
        """Returns folders as PEFT writes them: random adapters of all projections."""
        return [self._made(f"a{number}", partial(self._write_adapter, number)) for number in range(NUM_ADAPTERS)]

    def openvino(self, python: str) -> Path:
        """Returns OpenVINO's folder, which optimum-intel in the environment of that Python exports."""
        command = [str(Path(python).parent / "optimum-cli"), "export", "openvino", "--model", str(self.checkpoint())]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        return self._made("openvino", lambda path: _run([*command, str(path)]))

    def gguf(self, kind: str, python: str) -> Path:
        """Returns a GGUF file of this kind (BF16, Q4_0, Q4_1), which llama.cpp in that Python's environment writes."""
        if self.model.stored and kind == "Q4_1":
            return resolve_model(self.model.stored)
        if not self.model.stored and kind == "BF16":
            return self._made("BF16.gguf", self._write_gguf)
        if not python:
            raise StartupError(f"{kind} is written by llama.cpp: no --llamacpp PYTHON")
        source = resolve_model(self.model.stored) if kind == "BF16" else self.gguf("BF16", python)
        command = [python, "-m", "benchmarks.peers.engines.llamacpp", str(source)]
        return self._made(f"{kind}.gguf", lambda path: _run([*command, str(path), kind]))

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        path = self.cache / self.model.key / name
        if not path.exists():
            print(f"{self.model.title}: makes {name}", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"new-{name}")
            shutil.rmtree(temporary, ignore_errors=True)
            make(temporary)
            temporary.rename(path)
        return path

    def _write_checkpoint(self, path: Path) -> None:
        self.model.make().save_pretrained(path)
        default = resolve_model(DEFAULT_MODEL)
        AutoTokenizer.from_pretrained(default.parent, gguf_file=default.name).save_pretrained(path)

    def _write_adapter(self, seed: int, path: Path) -> None:
        generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
        for name, weight in load_file(self.checkpoint() / "model.safetensors").items():
            if name.endswith("_proj.weight"):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                for side, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                    values = 0.01 * torch.randn(shape, generator=generator)
                    tensors[f"{module}.lora_{side}.weight"] = values.bfloat16()
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": PROJECTIONS}
        (path / "adapter_config.json").write_text(json.dumps(config))

    def _write_gguf(self, path: Path) -> None:
        """Writes the checkpoint's weights beside the default model's tokenizer."""
        writer = gguf.GGUFWriter(path, "qwen3")
        _add_shape(writer)
        _add_tokenizer(writer, resolve_model(DEFAULT_MODEL))
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, QWEN3_SHAPE["num_hidden_layers"])
        model = Qwen3ForCausalLM.from_pretrained(self.checkpoint(), dtype=torch.bfloat16)
        # Without lm_head, which is the embedding once more.
        for name, weight in model.named_parameters():
            is_vector = weight.ndim == 1
            kind = gguf.GGMLQuantizationType.F32 if is_vector else gguf.GGMLQuantizationType.BF16
            values = weight.detach().float() if is_vector else weight.detach().view(torch.uint8)
            writer.add_tensor(f"{names.get_name(name, try_suffixes=('.weight',))}", values.numpy(), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_shape(writer: gguf.GGUFWriter) -> None:
    shape = QWEN3_SHAPE
    writer.add_name("qwen3-0.5b")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_parameters"]["rope_theta"])


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    for name, value in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            sub_type: Any = value.types[-1] if value.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], sub_type)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise StartupError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-2000:]}")
