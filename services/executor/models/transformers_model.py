"""Any other decoder-only architecture: transformers' own modelling code over our paged attention.

transformers looks its attention function up by name, so ours is registered there under `pagewire_paged`. It is called
with one packed batch [1, num_tokens] and no mask (transformers builds none for a name that it has no mask for).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import ModelOutput
from transformers.utils import logging as transformers_logging

from pagewire.errors import StartupError
from pagewire.services.executor import memory
from pagewire.services.executor.attention import AttentionMetadata, PagedAttention
from pagewire.services.executor.loading.checkpoint import DirectoryCheckpoint, GgufCheckpoint
from pagewire.services.executor.loading.model_config import ModelConfig, ModelLoadError, token_ids
from pagewire.services.executor.loading.weights.kv_scales import is_attention_scale
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.models import ARCHITECTURES

_ATTENTION_NAME = "pagewire_paged"
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asked of attention in the trial run."""

    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int
    soft_cap: float


class AttentionLayers:
    """The attention layers of one model. A trial run finds out what they are, every later run goes through them."""

    attn: AttentionMetadata  # of the step that is running

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.calls: dict[int, AttentionCall] = {}  # transformers' layer_idx -> call of the trial run
        self.layers: dict[int, PagedAttention] = {}  # transformers' layer_idx -> layer; empty during the trial run

    def record(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Trial run: checks that paged attention can do what this layer needs. Shapes as `_attention`."""
        layer_idx = module.layer_idx
        if layer_idx in self.calls:
            self.refuse(f"layer {layer_idx} attends more than once")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            self.refuse(
                f"queries, keys and values of layer {layer_idx} differ in size ({query.shape[-1]}, {key.shape[-1]}, "
                f"{value.shape[-1]}), as in latent attention"
            )
        is_causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            self.refuse(f"attention of layer {layer_idx} is not causal")
        for name in ("s_aux", "position_bias", "score_mod"):
            if options.get(name) is not None:
                self.refuse(f"layer {layer_idx} uses {name} in its attention")
        scale = options.get("scaling")
        self.calls[layer_idx] = AttentionCall(
            num_kv_heads=key.shape[1],
            head_dim=key.shape[-1],
            scale=key.shape[-1] ** -0.5 if scale is None else float(scale),
            sliding_window=options.get("sliding_window") or 0,
            soft_cap=options.get("softcap") or 0.0,
        )
        return query.transpose(1, 2)

    def refuse(self, reason: str) -> None:
        raise ModelLoadError(f"{self.architecture} cannot run over paged attention: {reason}")


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers calls this: query [1, num_heads, num_tokens, head_dim] -> [1, num_tokens, num_heads, head_dim]"""
    state: AttentionLayers = module.pagewire
    if not state.layers:
        return state.record(module, query, key, value, options), None
    layer = state.layers[module.layer_idx]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    # Rotating a part of each head leaves the heads apart, where the kernels ask for a token's side by side.
    output = layer(query.contiguous(), key, value, state.attn)
    return output.unsqueeze(0), None


AttentionInterface.register(_ATTENTION_NAME, _attention)


class _HiddenStates(nn.Module):
    """Takes the decoder's place under the head and hands over hidden states that were computed before."""

    def __init__(self, output_type: type[ModelOutput]) -> None:
        super().__init__()
        self.output_type = output_type

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> ModelOutput:
        return self.output_type(last_hidden_state=inputs_embeds)


class TransformersModel:
    """A transformers causal language model, split into its decoder and its head, driven like our own models."""

    # Its modelling code may look at values on the host, which a CUDA graph cannot replay.
    capturable = False

    def __init__(self, causal_lm: Any, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._state = AttentionLayers(type(causal_lm).__name__)
        self._decoder = causal_lm.base_model
        self._text_config = causal_lm.config.get_text_config()
        parameters = list(causal_lm.parameters())  # shared ones once
        self.weight_bytes = sum(parameter.nbytes for parameter in parameters)
        self._check_signature(causal_lm)
        for module in self._decoder.modules():
            if hasattr(module, "layer_idx"):
                module.pagewire = self._state
        output_type = self._trial_run(device)
        # The head keeps its own arithmetic (logit scale, soft cap, ...): it runs as transformers wrote it.
        setattr(causal_lm, causal_lm.base_model_prefix, _HiddenStates(output_type))
        self._head = causal_lm
        self.config = self._model_config(causal_lm, eos_token_ids)

    def _check_signature(self, causal_lm: Any) -> None:
        if self._decoder is causal_lm:
            self._state.refuse("its decoder is not separate from its head")
        if "position_ids" not in inspect.signature(self._decoder.forward).parameters:
            self._state.refuse("it does not take position_ids")

    def _trial_run(self, device: torch.device) -> type[ModelOutput]:
        """Finds the attention layers by running one token; returns what kind of output the decoder gives its head."""
        state, zero = self._state, torch.zeros(1, 1, dtype=torch.int64, device=device)
        try:
            with torch.inference_mode():
                output = self._decoder(input_ids=zero, position_ids=zero, use_cache=False)
        except ModelLoadError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise ModelLoadError(f"{state.architecture} cannot run over paged attention: {error}") from error
        if not state.calls:
            state.refuse("it does not use transformers' attention interface")
        if len({(call.num_kv_heads, call.head_dim) for call in state.calls.values()}) > 1:
            state.refuse("its layers differ in key/value heads or head size")
        layer_types = getattr(self._text_config, "layer_types", None)
        for layer_idx, call in state.calls.items():
            if layer_types and (layer_types[layer_idx] == "sliding_attention") != (call.sliding_window > 0):
                state.refuse(f"layer {layer_idx} does not pass the window of its layer_types to attention")
        state.layers = {
            layer_idx: PagedAttention(call.scale, call.sliding_window, call.soft_cap)
            for layer_idx, call in sorted(state.calls.items())
        }
        return type(output)

    def _model_config(self, causal_lm: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        config, calls = self._text_config, self._state.calls
        call = next(iter(calls.values()))
        return ModelConfig(
            architecture=self._state.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            num_layers=len(calls),
            num_heads=config.num_attention_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=call.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            sliding_windows=tuple(calls[layer_idx].sliding_window for layer_idx in sorted(calls)),
            dtype=causal_lm.dtype,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            eos_token_ids=eos_token_ids,
        )

    @property
    def attention_layers(self) -> list[PagedAttention]:
        return list(self._state.layers.values())

    def bind_kv_cache(self, kv_caches: list[Tensor]) -> None:
        for layer, kv_cache in zip(self._state.layers.values(), kv_caches, strict=True):
            layer.kv_cache = kv_cache

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        self._state.attn = attn
        output = self._decoder(input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        return output.last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]


def load_transformers_model(
    checkpoint: DirectoryCheckpoint | GgufCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    dummy_seed: int | None,
) -> TransformersModel:
    """Loads through `AutoModelForCausalLM`; `dummy_seed` given: random weights instead of the checkpoint's.

    Raises ModelLoadError for an architecture that paged attention cannot serve and for an incomplete checkpoint.
    """
    transformers_logging.disable_progress_bar()
    is_gguf = isinstance(checkpoint, GgufCheckpoint)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(checkpoint.path)}
    if is_gguf:
        source = {
            "pretrained_model_name_or_path": str(checkpoint.path.parent),
            "gguf_file": checkpoint.path.name,
        }
    try:
        config = AutoConfig.from_pretrained(**source)
        check_architecture(config, checkpoint.architecture, max_model_len)
        options = {"config": config, "dtype": dtype, "attn_implementation": _ATTENTION_NAME}
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


def check_architecture(config: Any, architecture: str, max_model_len: int | None) -> None:
    """Refuses by its config, before any weight is read, what paged attention cannot serve."""

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
            + ("leave --model-impl out" if own else f"that is {', '.join(ARCHITECTURES)}; use a checkpoint in 16 bits")
        )
    text_config = config.get_text_config()
    other = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        refuse(f"config key layer_types has {', '.join(sorted(other))}")
    if getattr(text_config, "max_position_embeddings", None) is None:
        refuse("config key max_position_embeddings is missing, its positions have no limit to check against")
    check_length(text_config, max_model_len)


def checkpoint_is_quantized(config: Any) -> bool:
    """transformers marks a GGUF file, which it dequantizes as we do, by a quantization_config of its own."""
    quantization = getattr(config, "quantization_config", None) or {}
    return quantization.get("quant_method", "gguf") != "gguf"


def check_length(config: Any, max_model_len: int | None) -> None:
    """Position scaling that transformers re-evaluates by batch length must stay out of reach: keys are cached."""
    served = max_model_len or config.max_position_embeddings
    limit, key = config.max_position_embeddings, "max_position_embeddings"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
        limit = rope.get("original_max_position_embeddings") or limit
        key = f"the unscaled length of rope_type {rope['rope_type']}"
    if served > limit:
        raise ModelLoadError(f"--max-model-len {served} exceeds {limit} ({key}); lower it to {limit}")


def check_loaded(checkpoint: DirectoryCheckpoint | GgufCheckpoint, info: dict[str, Any]) -> None:
    """transformers fills missing tensors with noise; here an incomplete checkpoint is an error."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name) for name in info.get(kind) or () if not is_attention_scale(str(name)))
        if names:
            raise ModelLoadError(
                f"{checkpoint.path}: the checkpoint does not fit its config: {len(names)} {kind.replace('_keys', '')} "
                f"tensors: {', '.join(names[:5])}"
            )
