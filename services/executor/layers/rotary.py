"""Rotary position embedding: the frequencies of every variant, evaluated once into a table.

Formulas: RoPE (Su et al. 2021), linear position interpolation (Chen et al. 2023), dynamic NTK scaling, YaRN
(Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3.1's frequency bands and Gemma's proportional RoPE. Values equal
those of transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagewire.services.executor.config.load_error import ModelLoadError
from pagewire.services.executor.config.rope_config import RopeConfig
from pagewire.services.executor.device import memory


class RotaryEmbedding:
    """The table by which halves of query and key heads are rotated, shared by all layers of a model.

    The table is fixed for the life of the model, because cached keys were rotated by it. transformers re-evaluates some
    scalings at the length of the current batch; here they are evaluated once, at `max_model_len`. Up to the trained
    length nothing is scaled; beyond it dynamic NTK scaling treats every request as one of the longest served length,
    and LongRoPE takes the long factors for all. So a request's tokens never depend on its neighbours or on its own
    final length.
    """

    __slots__ = ("cos_sin_cache",)

    def __init__(self, rope: RopeConfig, head_dim: int, max_model_len: int, device: torch.device) -> None:
        """Raises OutOfMemoryError if host memory, where the table is made, cannot hold it."""
        memory.check_positions_fit(max_model_len, head_dim)
        rotary_dim = rope.rotary_dim(head_dim)
        if rotary_dim % 2:
            raise ModelLoadError(
                f"{rotary_dim} of {head_dim} dimensions of a head are rotated; they are rotated in pairs"
            )
        if device.type == "meta":  # only shapes are needed; torch takes a second to load its meta arithmetic
            self.cos_sin_cache = torch.empty(max_model_len, rotary_dim, device=device)
            return
        frequencies, attention_factor = rope_frequencies(rope, rotary_dim, max_model_len)
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
        self.cos_sin_cache = cos_sin.to(device)  # fp32 [max_model_len, rotary_dim]


def rope_frequencies(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """Returns inverse frequencies, fp32 [rotary_dim / 2], and the factor of cos and sin."""
    theta = _dynamic_theta(rope, rotary_dim, max_model_len) if rope.rope_type == "dynamic" else rope.rope_theta
    wavelengths = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    frequencies = 1.0 / wavelengths
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.rope_type == "linear":
        return frequencies / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(wavelengths, rotary_dim, rope), _yarn_attention_factor(rope)
    if rope.rope_type == "longrope":
        return _longrope(wavelengths, rope, max_model_len), _longrope_attention_factor(rope)
    if rope.rope_type == "proportional":
        return _proportional(frequencies, rope), 1.0
    return frequencies, 1.0


def _dynamic_theta(rope: RopeConfig, rotary_dim: int, max_model_len: int) -> float:
    trained_len = rope.original_max_position_embeddings
    length = max(max_model_len, trained_len)
    stretch = rope.factor * length / trained_len - (rope.factor - 1)
    return rope.rope_theta * stretch ** (rotary_dim / (rotary_dim - 2))


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Keeps high frequencies, divides low ones by `factor`, and interpolates those between."""
    trained_len = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (trained_len / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > trained_len / low, frequencies / rope.factor, between)
    return torch.where(wavelengths < trained_len / high, frequencies, scaled)


def _yarn(wavelengths: Tensor, rotary_dim: int, rope: RopeConfig) -> Tensor:
    """Blends interpolated and original frequencies by a ramp between `beta_fast` and `beta_slow` rotations."""

    def dimension(rotations: float) -> float:
        trained = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim * math.log(trained) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step instead of a division by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def _longrope(wavelengths: Tensor, rope: RopeConfig, max_model_len: int) -> Tensor:
    """Stretches each wavelength by its own factor, which was found by search."""
    is_long = max_model_len > rope.original_max_position_embeddings
    name, factors = ("long_factor", rope.long_factor) if is_long else ("short_factor", rope.short_factor)
    if len(factors) != len(wavelengths):
        raise ModelLoadError(f"rope parameter {name}: expected {len(wavelengths)} numbers, found {len(factors)}")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def _proportional(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Sets the slow frequencies to 0, as if they were infinitely slow."""
    num_turned = int(rope.partial_rotary_factor * len(frequencies))
    return torch.cat((frequencies[:num_turned], torch.zeros(len(frequencies) - num_turned))) / rope.factor
