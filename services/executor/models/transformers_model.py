"""Any other decoder-only architecture: transformers' own modelling code over our paged attention.

transformers looks its attention function up by name, so ours is registered there under `pagewire_paged`. It is called
with one packed batch [1, num_tokens] and no mask (transformers builds none for a name that it has no mask for).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import ModelOutput

from pagewire.services.executor.config.model_config import ModelConfig, ModelLoadError
from pagewire.services.executor.layers.attention.paged_attention import PagedAttention
from pagewire.services.executor.layers.kv_spec import CacheSpec, KVSpec
from pagewire.services.executor.step.step_context import StepContext

ATTENTION_NAME = "pagewire_paged"


class AttentionLayers:
    """The attention layers of one model. A trial run finds them, later runs call them."""

    context: StepContext  # of the step that is running

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.is_trial = True
        self.layers: dict[int, PagedAttention] = {}  # by transformers' layer_idx

    def record(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Checks in the trial run that paged attention supports this layer. Shapes as in `_attention`."""
        layer_idx = module.layer_idx
        if layer_idx in self.layers:
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
        num_kv_heads, head_dim = key.shape[1], key.shape[-1]
        scale = options.get("scaling")
        self.layers[layer_idx] = PagedAttention(
            layer_idx,
            KVSpec(num_kv_heads, head_dim, key.dtype, options.get("sliding_window") or 0),
            scale=head_dim**-0.5 if scale is None else float(scale),
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
    if state.is_trial:
        return state.record(module, query, key, value, options), None
    layer = state.layers[module.layer_idx]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    # Rotating a part of each head leaves gaps between heads, but the kernels need a token's heads side by side.
    output = layer(query.contiguous(), key, value, state.context)
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)


class _HiddenStates(nn.Module):
    """Replaces the decoder under the head and returns hidden states that were computed before."""

    def __init__(self, output_type: type[ModelOutput]) -> None:
        super().__init__()
        self.output_type = output_type

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> ModelOutput:
        return self.output_type(last_hidden_state=inputs_embeds)


class TransformersModel:
    """A transformers causal language model, split into its decoder and its head, driven like our own models."""

    # Its modelling code may read values on the host, which a CUDA graph cannot replay; on a CPU, recording detects it.
    capturable = False
    cache_order: Sequence[CacheSpec] = ()
    generates = True
    classifier = None

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
        # The head keeps its arithmetic (logit scale, soft cap, ...): it runs transformers' code.
        setattr(causal_lm, causal_lm.base_model_prefix, _HiddenStates(output_type))
        self._head = causal_lm
        self.config = ModelConfig(
            architecture=self._state.architecture,
            vocab_size=self._text_config.vocab_size,
            hidden_size=self._text_config.hidden_size,
            max_position_embeddings=self._text_config.max_position_embeddings,
            dtype=causal_lm.dtype,
            eos_token_ids=eos_token_ids,
        )
        self._check_head(device)

    def _check_head(self, device: torch.device) -> None:
        """Refuses heads that need more of the decoder than its output."""
        try:
            with torch.inference_mode():
                self.compute_logits(torch.zeros(1, self.config.hidden_size, dtype=self.config.dtype, device=device))
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            self._state.refuse(f"its head cannot run apart from its decoder ({error})")

    def _check_signature(self, causal_lm: Any) -> None:
        if self._decoder is causal_lm:
            self._state.refuse("its decoder is not separate from its head")
        if "position_ids" not in inspect.signature(self._decoder.forward).parameters:
            self._state.refuse("it does not take position_ids")

    def _trial_run(self, device: torch.device) -> type[ModelOutput]:
        """Finds the attention layers by running one token; returns the kind of output that the head gets."""
        state, zero = self._state, torch.zeros(1, 1, dtype=torch.int64, device=device)
        try:
            with torch.inference_mode():
                output = self._decoder(input_ids=zero, position_ids=zero, use_cache=False)
        except ModelLoadError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise ModelLoadError(f"{state.architecture} cannot run over paged attention: {error}") from error
        if not state.layers:
            state.refuse("it does not use transformers' attention interface")
        layer_types = getattr(self._text_config, "layer_types", None)
        for layer_idx, layer in state.layers.items():
            if layer_types and (layer_types[layer_idx] == "sliding_attention") != (layer.window > 0):
                state.refuse(f"layer {layer_idx} does not pass the window of its layer_types to attention")
        state.is_trial = False
        return type(output)

    @property
    def caching_layers(self) -> list[PagedAttention]:
        return self.attention_layers

    @property
    def attention_layers(self) -> list[PagedAttention]:
        return [self._state.layers[layer_idx] for layer_idx in sorted(self._state.layers)]

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        self._state.context = context
        output = self._decoder(
            input_ids=input_ids.unsqueeze(0), position_ids=context.positions.unsqueeze(0), use_cache=False
        )
        return output.last_hidden_state[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
