"""Calibration text that the model itself generates, if none is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from pagewire.quantize.model.decoder import Decoder

_BATCH = 32  # sequences sampled at once, to bound their KV cache


def sample_sequences(
    decoder: Decoder, count: int, length: int, seed: int, report: Callable[[int], None] = lambda count: None
) -> Tensor:
    """Returns int64 [count, length]: sampled with temperature 1, each from a first token drawn at random.

    Takes memory for the whole model. report: is told each number of tokens that were sampled.
    """
    generator = torch.Generator(decoder.device).manual_seed(seed)
    with decoder.whole_model() as model:
        sizes = [min(_BATCH, count - start) for start in range(0, count, _BATCH)]
        batches = [_sample(model, size, length, generator, report) for size in sizes]
    return torch.cat(batches).cpu()


def _sample(model: Any, count: int, length: int, generator: torch.Generator, report: Callable[[int], None]) -> Tensor:
    vocab_size = model.config.vocab_size
    tokens = torch.randint(vocab_size, (count, 1), generator=generator, device=generator.device)
    sampled, cache = [tokens], DynamicCache(config=model.config)
    for _ in range(length - 1):
        logits = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        tokens = torch.multinomial(logits.float().softmax(dim=-1), 1, generator=generator)
        sampled.append(tokens)
        report(count)
    return torch.cat(sampled, dim=1)
