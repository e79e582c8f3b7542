"""The predicted footprint of a model is the memory that it takes."""

import dataclasses

import pytest

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.loading.footprint import footprint
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.step.limits import Limits
from tests.services.executor.loading.dense_weights import padding_bytes
from tests.services.executor.models.tiny import load, save_tiny

_LIMITS = Limits(8, 256, 64, 16)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_of_weights_and_cache(tmp_path, family) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}  # nothing is padded
    save_tiny(tmp_path, family, num_attention_heads=2, num_key_value_heads=1, **sizes)
    said = footprint(ExecutorConfig(model=str(tmp_path), dtype="bfloat16"), tmp_path)
    loaded = load(tmp_path, dtype="bfloat16")
    assert said is not None and isinstance(loaded, DecoderModel)
    assert said.weight_bytes == loaded.weight_bytes - padding_bytes(loaded)  # which may hold scales
    assert said.cache_bytes(160, _LIMITS) == kv_cache.cache_bytes(loaded, 10, _LIMITS)


def test_of_quantized_weights(smollm2_gguf) -> None:
    stored = ExecutorConfig(model=str(smollm2_gguf))
    dense = dataclasses.replace(stored, quantization="none", dtype="float32")
    in_4_bits, in_32_bits = footprint(stored, smollm2_gguf), footprint(dense, smollm2_gguf)
    assert in_4_bits is not None and in_32_bits is not None
    assert 4 * 134e6 < in_32_bits.weight_bytes < 4 * 136e6
    assert 70e6 < in_4_bits.weight_bytes < 130e6


def test_too_long_a_request_is_refused(tmp_path) -> None:
    save_tiny(tmp_path, "Llama")
    with pytest.raises(StartupError, match="--max-model-len"):
        footprint(ExecutorConfig(model=str(tmp_path), max_model_len=1 << 20), tmp_path)
