"""The architectures we implement ourselves, by the class name in `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pagewire.services.executor.loading.model_config import ModelConfig
from pagewire.services.executor.models.llama import llama_config, mistral_config
from pagewire.services.executor.models.qwen2 import qwen2_config
from pagewire.services.executor.models.qwen3 import qwen3_config

ARCHITECTURES: dict[str, Callable[[Mapping[str, Any], torch.dtype], ModelConfig]] = {
    "LlamaForCausalLM": llama_config,
    "MistralForCausalLM": mistral_config,
    "Qwen2ForCausalLM": qwen2_config,
    "Qwen3ForCausalLM": qwen3_config,
}
