"""Facts about a model from its files, read without torch and without a download, for `--show-config` and the doctor."""

import json
import math
import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pagewire.config.model_refusals import FORMAT_FILES
from pagewire.files.gguf import GgufError, read_header
from pagewire.files.models import local_model

# Types of GGUF's tensors -> bits of a weight, scales not counted.
_BITS_OF_TYPE = {0: 32, 1: 16, 30: 16, 8: 8, 14: 6, 6: 5, 7: 5, 13: 5, 11: 3, 10: 2} | dict.fromkeys(
    (2, 3, 12, 20, 23, 39), 4
)
_BITS_OF_DTYPE = {"bfloat16": 16, "float16": 16, "float32": 32}
_BITS_OF_METHOD = {"mxfp4": 4, "fp8": 8, "fbgemm_fp8": 8}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model; 0 or "" means unknown, or different between layers."""

    path: Path
    max_len: int = 0  # tokens
    dtype: str = ""
    quantization: str = ""
    kv_elements: int = 0  # of keys and values of one token, in all layers
    head_dim: int = 0
    has_state: bool = False  # some layers keep a state instead of keys and values
    can_be_8_bits: bool = True  # some layers keep keys and values, not only latent vectors
    architecture: str = ""
    heads: int = 0
    kv_heads: int = 0
    layers: int = 0
    has_experts: bool = False
    longest: int = 0  # most positions, if no scaling stretches them
    bits: int = 0  # of most weights
    most_bits: int = 0  # of any weight of a layer, and of the output projection if it has more than 8


def facts_of(
    model: str, download_dir: str | None = None, revision: str | None = None, gguf: str | None = None
) -> ModelFacts | None:
    """Returns None if the model's files are not on this machine, or cannot be read."""
    path = local_model(model, download_dir, revision, gguf)
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        path = next(iter(path.glob("*.gguf")), None)
    if path is None:
        return None
    try:
        if path.suffix == ".gguf":
            return _of_gguf(path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        facts = _of_config(path, config if isinstance(config, dict) else {})
        return facts if _are_sound(facts) else None
    except (OSError, ValueError, GgufError, RecursionError):
        return None
    except (TypeError, AttributeError, ArithmeticError):  # a value of config.json has another type than it has to have
        return None


def _are_sound(facts: ModelFacts) -> bool:
    """Returns whether all numbers are numbers: config.json may have anything in their places."""
    numbers = (getattr(facts, field.name) for field in fields(facts) if field.type is int)
    return all(isinstance(one, int) and 0 <= one < 2**31 for one in numbers)


def _of_gguf(path: Path) -> ModelFacts:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = read_header(data, skip_string_arrays=True)
    keys = header.metadata
    bits = Counter[int]()  # number of weights
    head_bits = 0
    for tensor in header.tensors:
        of_tensor = _BITS_OF_TYPE.get(tensor.type, 0)
        if len(tensor.shape) > 1 and tensor.name.startswith("blk."):
            bits[of_tensor] += math.prod(tensor.shape)
        elif tensor.name in ("output.weight", "token_embd.weight"):
            head_bits = of_tensor if tensor.name == "output.weight" or not head_bits else head_bits
    architecture = keys.get("general.architecture", "")

    def number(key: str) -> int:
        value = keys.get(f"{architecture}.{key}", 0)
        return value if isinstance(value, int) else 0

    heads = number("attention.head_count")
    head_dim = number("attention.key_length") or (number("embedding_length") // heads if heads else 0)
    layers, kv_heads = number("block_count"), number("attention.head_count_kv") or heads
    is_latent, has_state = f"{architecture}.attention.kv_lora_rank" in keys, bool(number("ssm.state_size"))
    # As below; layers may also differ in their numbers of heads.
    differ = is_latent or has_state or bool(number("attention.sliding_window"))
    differ |= isinstance(keys.get(f"{architecture}.attention.head_count_kv"), list)
    elements = 0 if differ else 2 * layers * kv_heads * head_dim
    return ModelFacts(
        path,
        number("context_length"),
        "bfloat16",
        "gguf",
        elements,
        has_state=has_state,
        can_be_8_bits=not is_latent and not (has_state and not heads),
        architecture=str(architecture),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        has_experts=bool(number("expert_count")),
        bits=bits.most_common(1)[0][0] if bits else 0,
        most_bits=0 if 0 in bits else max(*bits, head_bits if head_bits > 8 else 0, 0),
        longest=0 if any("rope.scaling" in key or has_state for key in keys) else number("context_length"),
    )


def _of_config(path: Path, config: Mapping[str, Any]) -> ModelFacts:
    text = config.get("text_config") or config
    heads = text.get("num_attention_heads") or 0
    head_dim = text.get("head_dim") or (text.get("hidden_size", 0) // heads if heads else 0)
    elements = 2 * text.get("num_hidden_layers", 0) * (text.get("num_key_value_heads") or heads) * head_dim
    types = text.get("layer_types") or text.get("layers_block_type") or ()
    has_state = any(key.startswith(("mamba_", "ssm_")) or key == "state_size" for key in text)
    has_state |= any("linear" in one or "mamba" in one or "recurrent" in one for one in map(str, types))
    # Layers with a window, a state or a latent keep something else per token.
    if has_state or text.get("sliding_window") or text.get("kv_lora_rank") or types:
        elements = 0
    quantized = config.get("quantization_config") or text.get("quantization_config") or {}
    dtype = str(config.get("torch_dtype") or config.get("dtype") or text.get("dtype") or "")
    early = next((name for name, file in FORMAT_FILES.items() if (path / file).is_file()), "")
    is_stretched = has_state or any(text.get(key) for key in ("rope_scaling", "rope_parameters"))
    return ModelFacts(
        path,
        text.get("max_position_embeddings") or 0,
        dtype,
        str(quantized.get("quant_method", early)),
        elements,
        has_state=has_state,
        can_be_8_bits=not text.get("kv_lora_rank") and not (has_state and not heads),
        architecture=str(next(iter(config.get("architectures") or ()), "the model")),
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        layers=text.get("num_hidden_layers") or 0,
        has_experts=any("expert" in key and value for key, value in text.items()),
        bits=_bits_of(quantized, dtype),
        longest=0 if is_stretched else text.get("max_position_embeddings") or 0,
    )


def _bits_of(quantized: Mapping[str, Any], dtype: str) -> int:
    """Returns the bits of most weights. quantized: the value of `quantization_config`; empty: they are of this type."""
    if not quantized:
        return _BITS_OF_DTYPE.get(dtype, 0)
    groups = quantized.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(bits := (group.get("weights") or {}).get("num_bits"), int):
            return bits
    if quantized.get("load_in_4bit") or quantized.get("load_in_8bit"):
        return 4 if quantized.get("load_in_4bit") else 8
    bits = quantized.get("bits", quantized.get("w_bit"))
    return bits if isinstance(bits, int) else _BITS_OF_METHOD.get(str(quantized.get("quant_method")), 0)
