"""GGUF files as llama.cpp's converter writes them: tensors named by the `gguf` package, in the orders of
`convert_hf_to_gguf.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from tests.services.executor.loading.weights.test_gguf import interleave

LLAMA_ROTARY = ("granite", "mistral3", "smollm3")  # converted as Llama
FUSED = ("falcon", "gptneox")  # queries, keys and values are put apart


def write(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    **metadata: Any,
) -> Path:
    """Writes a GGUF file of a model. `metadata` is by key without the architecture's name, with __ for a dot; None
    leaves a key out.

    tensors: replaces, adds or (None) removes tensors by their GGUF name. types: of those that are
    given as blocks.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (_metadata(config) | {key.replace("__", "."): value for key, value in metadata.items()}).items():
        _add(writer, f"{arch}.{key}", value)
    for name in ("long", "short"):
        if factors := (getattr(config, "rope_parameters", None) or {}).get(f"{name}_factor"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, dtype=np.float32))
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    arrays: dict[str, np.ndarray | None] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, array in _converted(arch, name, value.numpy(), config):
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part
            arrays[stored] = array
    for name, stored_array in (arrays | dict(tensors or {})).items():
        if stored_array is not None:
            writer.add_tensor(name, np.ascontiguousarray(stored_array), raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = [getattr(config, name, None) for name in ("n_inner", "ffn_hidden_size", "intermediate_size")]
    kv_heads = [getattr(config, name, None) for name in ("num_key_value_heads", "num_kv_heads")]
    eps = [getattr(config, name, None) for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")]
    rms_eps = getattr(config, "rms_norm_eps", None)
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": next((size for size in inner if size), 4 * config.hidden_size),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": next((number for number in kv_heads if number), None),
        "attention.layer_norm_rms_epsilon": rms_eps,
        "attention.layer_norm_epsilon": None if rms_eps else next((value for value in eps if value), None),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        **(_yarn(rope) if rope.get("rope_type") == "yarn" else {}),
    }


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _converted(arch: str, name: str, array: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if arch == "bert":
        if not name.startswith("pooler."):
            yield name.removeprefix("roberta."), array
        return
    if arch in LLAMA_ROTARY and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        yield name, interleave(array, heads)
    elif arch in FUSED and "query_key_value" in name:
        heads = config.num_attention_heads
        kv_heads = heads if arch == "gptneox" else config.num_kv_heads if config.new_decoder_architecture else 1
        apart = array.reshape(kv_heads, heads // kv_heads + 2, config.hidden_size // heads, *array.shape[1:])
        parts = (apart[:, :-2], apart[:, -2], apart[:, -1])
        yield name, np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
    elif name.endswith(".kv_b_proj.weight"):
        of_heads = array.reshape(config.num_attention_heads, -1, array.shape[1])
        keys, values = np.split(of_heads, [config.qk_nope_head_dim], axis=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    elif arch == "deepseek2" and name.endswith(".experts.gate_up_proj"):
        gate, up = np.split(array, 2, axis=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    elif name.endswith((".experts.down_proj", ".e_score_correction_bias")) and arch == "deepseek2":
        yield f"{name}.weight" if name.endswith("proj") else name.replace("_bias", ".bias"), array
    elif name.endswith(".sinks"):
        yield f"{name}.weight", array
    elif arch == "gpt-oss" and ".experts." in name:
        dense = array if name.endswith("_bias") else array.swapaxes(-1, -2)
        suffix = "bias" if name.endswith("_bias") else "weight"
        place, _, projection = name.removesuffix("_bias").rpartition(".")
        if projection == "down_proj":
            yield f"{place}.down_proj.{suffix}", dense
        else:
            yield f"{place}.gate_proj.{suffix}", dense[:, ::2]
            yield f"{place}.up_proj.{suffix}", dense[:, 1::2]
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), array
    elif arch == "mamba2" and name.endswith((".A_log", ".D")):
        yield name, (-np.exp(array) if name.endswith(".A_log") else array).reshape(-1, 1)
    elif arch == "mamba2" and name.endswith((".mixer.norm.weight", ".conv1d.weight")):
        yield name, array.reshape(config.n_groups, -1) if "norm" in name else array.squeeze()
    elif arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        yield name, array.T
    else:
        yield name, array
