"""SmolLM3: Llama, with every fourth layer left without rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, ModelLoadError, layer_windows, optional
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.dense.llama import llama_config


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    rotates: tuple[bool, ...]  # by layer


def smollm3_config(raw: Mapping[str, Any], dtype: torch.dtype) -> SmolLM3Config:
    raw = {"tie_word_embeddings": True, **raw}
    decoder = llama_config(raw, dtype)
    listed = raw.get("no_rope_layers")  # despite its name, 1 if a layer rotates
    if listed is None:
        interval = optional(raw, "no_rope_layer_interval", 4)
        rotates = tuple((layer_idx + 1) % interval != 0 for layer_idx in range(decoder.num_layers))
    else:
        rotates = tuple(map(bool, listed[: decoder.num_layers]))
    if len(rotates) != decoder.num_layers:
        raise ModelLoadError(
            f"config key no_rope_layers: {len(rotates)} entries, num_hidden_layers is {decoder.num_layers}"
        )
    windows = layer_windows({"layer_types": ["full_attention"] * decoder.num_layers, **raw})
    return SmolLM3Config(**vars(decoder) | {"sliding_windows": windows}, rotates=rotates)


class SmolLM3Model(DecoderModel):
    config: SmolLM3Config

    def rotaries(
        self, config: DecoderConfig, max_model_len: int, device: torch.device
    ) -> Sequence[RotaryEmbedding | None]:
        assert isinstance(config, SmolLM3Config)
        return [self.rotary if rotates else None for rotates in config.rotates]


ARCHITECTURES = (
    Architecture(
        "SmolLM3ForCausalLM", "smollm3", smollm3_config, SmolLM3Model, GgufForm("smollm3", interleaved_rotary=True)
    ),
)
