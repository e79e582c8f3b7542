"""The built-in model, run from its 4-bit file as it is, beside the same weights dequantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.perplexity import perplexity, text_windows
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model

TEXT = Path(__file__).parents[4] / "quantize" / "model" / "evaluation.txt"
WINDOW = 128


@pytest.fixture(scope="module")
def models(smollm2_gguf: Path) -> tuple[Model, Model]:
    """Compares weights as stored, and dequantized; both compute in bf16."""

    def load(quantization: str | None) -> Model:
        return load_model(
            smollm2_gguf, dtype="bfloat16", device=torch.device("cpu"), max_model_len=WINDOW, quantization=quantization
        )

    return load("gguf"), load("none")


def test_memory(models: tuple[Model, Model]) -> None:
    native, dequantized = models
    assert native.weight_bytes < 0.45 * dequantized.weight_bytes


@pytest.mark.parametrize(
    ("rows", "step"), [(1, WINDOW), pytest.param(8, 1, marks=pytest.mark.slow)], ids=["prefill", "decode"]
)
def test_perplexity(models: tuple[Model, Model], smollm2_gguf: Path, rows: int, step: int) -> None:
    windows = text_windows(str(smollm2_gguf), TEXT, 8 * WINDOW, WINDOW)
    native, dequantized = (perplexity(model, windows, rows, step) for model in models)
    assert native == pytest.approx(dequantized, rel=0.005)
