"""Models with an int8 KV cache: numbers near those without, and everything that shares, splits or replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.perplexity import text_windows, window_scores
from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from pagewire.quantize.model import texts
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.twins import twins
from tests.services.executor.helpers.paged_batch import mixed_batch_logits
from tests.services.executor.helpers.stepping import BLOCK_SIZE, make_driver
from tests.services.executor.models.tiny import CPU, load, save_tiny
from tests.services.executor.parallel.threads import on_ranks

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},  # two groups
    "Phi": {"pad_token_id": 0},  # part of a head is rotated
}


@pytest.mark.parametrize("model_impl", ["pagewire", "transformers"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_near_those_of_a_whole_cache(tmp_path: Path, family: str, model_impl: str) -> None:
    save_tiny(tmp_path, family, **FAMILIES[family])
    exact, rounded = (load(tmp_path, kv_cache_dtype=name, model_impl=model_impl) for name in ("auto", "int8"))
    pairs = zip(mixed_batch_logits(exact, 67), mixed_batch_logits(rounded, 67), strict=True)
    for (_, expected), (_, logits) in pairs:
        assert 0 < (logits - expected).norm() < 0.1 * expected.norm()


def test_ranks_store_what_one_rank_does(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    (_, expected), *_ = mixed_batch_logits(load(tmp_path, kv_cache_dtype="int8"), 67)
    found = on_ranks(2, lambda ranks: mixed_batch_logits(load(tmp_path, kv_cache_dtype="int8", tensor=ranks), 67))
    for (_, logits), *_ in found:
        torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)


def test_a_cached_prefix_continues_as_if_computed(tmp_path: Path) -> None:
    """Continues in fp32, with which a token does not depend on what it is computed together with."""
    save_tiny(tmp_path, "Llama")
    driver = make_driver(load(tmp_path, kv_cache_dtype="int8"))
    prompt = [5 + 3 * i % 50 for i in range(20)]
    driver.add(0, prompt)
    first = driver.generate(0, 3, first=20)
    driver.add(1, prompt, shared_blocks=driver.blocks(0)[: 16 // BLOCK_SIZE])
    assert driver.generate(1, 3, first=4) == first


def test_weights_of_a_model_with_such_a_cache_can_be_replaced(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    used, loaded = (load(tmp_path, kv_cache_dtype="int8") for _ in range(2))
    kv_cache.allocate(used, [3], BLOCK_SIZE, CPU)
    assert len(twins(used, loaded)) == len(twins(loaded, loaded))


@torch.inference_mode()
def test_the_built_in_model_says_nearly_the_same() -> None:
    path = resolve_model(DEFAULT_MODEL)
    window = text_windows(str(path), Path(texts.__file__).with_name("evaluation.txt"), 96, 96)
    found = []
    for name in ("auto", "int8"):
        model = load_model(path, dtype="bfloat16", device=CPU, max_model_len=96, kv_cache_dtype=name)
        found.append(torch.cat([scores[0] for _, scores in window_scores(model, window, 24)]))
    exact, rounded = found
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert 0 < divergence.mean() < 0.01
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.9
