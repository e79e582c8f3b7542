"""Loads a model that runs in transformers' own code, through transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pagewire.errors import StartupError
from pagewire.services.executor.config.model_config import ModelLoadError, token_ids
from pagewire.services.executor.device import memory
from pagewire.services.executor.loading.checkpoint import Checkpoint, DirectoryCheckpoint
from pagewire.services.executor.loading.weights.kv_scales import is_attention_scale
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.models.transformers_model import ATTENTION_NAME, TransformersModel

_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_transformers_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    dummy_seed: int | None,
) -> TransformersModel:
    """Loads through `AutoModelForCausalLM`; `dummy_seed` given: random weights instead of the checkpoint's.

    Raises ModelLoadError for an architecture that paged attention cannot serve and for an incomplete checkpoint.
    """
    transformers_logging.disable_progress_bar()
    is_gguf = not isinstance(checkpoint, DirectoryCheckpoint)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(checkpoint.path)}
    if is_gguf:
        source = {
            "pretrained_model_name_or_path": str(checkpoint.path.parent),
            "gguf_file": checkpoint.path.name,
        }
    try:
        config = _read_config(checkpoint, source)
        check_architecture(config, checkpoint.architecture, max_model_len)
        options = {"config": config, "dtype": dtype, "attn_implementation": ATTENTION_NAME}
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(**options)
        memory.check_weights_fit(sum(parameter.nbytes for parameter in shapes.parameters()), device)
        if dummy_seed is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(dummy_seed)
                causal_lm = AutoModelForCausalLM.from_config(**options)
        else:
            if not is_gguf:
                SafetensorsSource(checkpoint.path)  # a missing or damaged file is reported by its name
            loaded: Any = AutoModelForCausalLM.from_pretrained(**source, **options, output_loading_info=True)
            causal_lm, info = loaded
            check_loaded(checkpoint, info)
    except StartupError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"{checkpoint.path}: transformers cannot load this model: {error}") from error
    causal_lm.to(device).eval().requires_grad_(False)
    eos_token_ids = checkpoint.eos_token_ids(token_ids(config.get_text_config().eos_token_id))
    return TransformersModel(causal_lm, eos_token_ids, device)


def _read_config(checkpoint: Checkpoint, source: dict[str, Any]) -> Any:
    if not isinstance(checkpoint, DirectoryCheckpoint):
        return AutoConfig.from_pretrained(**source)
    model_type = checkpoint.keys.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        own_code = "auto_map" in checkpoint.keys
        raise ModelLoadError(
            f"{checkpoint.path}/config.json: transformers does not implement model_type {model_type!r}"
            + ("; the checkpoint brings code of its own, which Pagewire never runs" if own_code else "")
            + "; use a version of the model that transformers implements"
        )
    if not checkpoint.overrides:
        return AutoConfig.from_pretrained(**source, trust_remote_code=False)
    return CONFIG_MAPPING[model_type].from_dict(checkpoint.keys)


def check_architecture(config: Any, architecture: str, max_model_len: int | None) -> None:
    """Refuses models that paged attention cannot serve by their config, before any weight is read."""

    def refuse(reason: str) -> None:
        raise ModelLoadError(f"{architecture} cannot run over paged attention: {reason}")

    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder model; only decoder-only models are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        refuse(f"transformers has no causal language model for model_type {config.model_type!r}")
    if getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        refuse("it keeps a recurrent state instead of a KV cache (state-space or linear attention)")
    if checkpoint_is_quantized(config):
        own = architecture in ARCHITECTURES
        refuse(
            "config key quantization_config: quantized checkpoints run in Pagewire's own model code only; "
            + ("leave --model-impl out" if own else "docs/models.md lists its models; use a checkpoint in 16 bits")
        )
    text_config = config.get_text_config()
    other = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        refuse(f"config key layer_types has {', '.join(sorted(other))}")
    if getattr(text_config, "max_position_embeddings", None) is None:
        refuse("config key max_position_embeddings is missing, its positions have no limit to check against")
    check_length(text_config, max_model_len)


def checkpoint_is_quantized(config: Any) -> bool:
    """Returns whether the weights are quantized. transformers dequantizes GGUF files as we do, but marks them by a
    special quantization_config."""
    quantization = getattr(config, "quantization_config", None) or {}
    return quantization.get("quant_method", "gguf") != "gguf"


def check_length(config: Any, max_model_len: int | None) -> None:
    """Refuses lengths at which transformers would re-evaluate position scaling by batch length: keys are cached."""
    served = max_model_len or config.max_position_embeddings
    limit, key = config.max_position_embeddings, "max_position_embeddings"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
        limit = rope.get("original_max_position_embeddings") or limit
        key = f"the unscaled length of rope_type {rope['rope_type']}"
    if served > limit:
        raise ModelLoadError(f"--max-model-len {served} exceeds {limit} ({key}); lower it to {limit}")


def check_loaded(checkpoint: Checkpoint, info: dict[str, Any]) -> None:
    """Raises an error for an incomplete checkpoint, as transformers would fill missing tensors with noise."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name) for name in info.get(kind) or () if not is_attention_scale(str(name)))
        if names:
            raise ModelLoadError(
                f"{checkpoint.path}: the checkpoint does not fit its config: {len(names)} {kind.replace('_keys', '')} "
                f"tensors: {', '.join(names[:5])}"
            )
