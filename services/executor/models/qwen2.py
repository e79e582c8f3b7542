"""Qwen2 and Qwen2.5: biased q, k and v projections, sliding window from a given layer on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.model_config import DecoderConfig, decoder_config, layer_windows


def qwen2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    return decoder_config(raw, dtype, qkv_bias=True, sliding_windows=layer_windows(raw))
