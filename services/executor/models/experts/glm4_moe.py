"""GLM-4.5 and 4.6: attention that rotates a part of each head, and experts like DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import decoder_config
from pagewire.services.executor.models.architecture import EXPERTS_ALIASES, Architecture
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.experts.deepseek_v2 import SparseConfig, SparseLayer, sparse_values
from pagewire.services.executor.models.experts.deepseek_v3 import is_behind, sigmoid_routing


def glm4_moe_config(raw: Mapping[str, Any], dtype: torch.dtype) -> SparseConfig:
    decoder = decoder_config(
        raw, dtype, qkv_bias=raw.get("attention_bias", False), qk_norm=raw.get("use_qk_norm", False)
    )
    routing = sigmoid_routing(raw, scale=1.0)
    first = raw.get("first_k_dense_replace", 1)
    return SparseConfig(**vars(decoder), **sparse_values(raw, decoder, routing, first_sparse_layer=first))


class Glm4MoeModel(DecoderModel):
    layer = SparseLayer

    def ignored(self, name: str) -> bool:
        return is_behind(name, self.config.num_layers) or super().ignored(name)


ARCHITECTURES = (
    Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        glm4_moe_config,
        Glm4MoeModel,
        aliases=EXPERTS_ALIASES,
        example={
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "first_k_dense_replace": 1,
            "head_dim": 64,
        },
    ),
)
