"""The report of a quantization: its result, and its cost in perplexity."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "quantization_report.json"


@dataclass(frozen=True)
class Tuning:
    """The effect of tuning. divergences: KL(original || quantized) per token of calibration text before the first and
    the last step. perplexity: that of the evaluation text before tuning.
    """

    steps: int
    divergences: tuple[float, float]
    perplexity: float


@dataclass(frozen=True)
class Report:
    """Numbers of a quantization. perplexity: before and after, on `num_tokens` predicted tokens. size: bytes of weights
    before (in the model's 16 bits) and after. errors: of each module, as LayerQuantizer reports it, before tuning.
    layer_errors: of each layer's output, as `tune_layer` reports it; empty if layers are not tuned.
    """

    settings: dict[str, Any]
    calibration: str
    evaluation: str
    num_tokens: int
    perplexity: tuple[float, float]
    size: tuple[int, int]
    errors: dict[str, float]
    seconds: float
    layer_errors: list[tuple[float, float]]
    tuning: Tuning | None = None

    def write(self, directory: Path) -> None:
        before, after = self.perplexity
        content = {
            "settings": self.settings,
            "calibration": self.calibration,
            "evaluation": self.evaluation,
            "evaluation_tokens": self.num_tokens,
            "perplexity_before": before,
            "perplexity_after": after,
            "weight_bytes_before": self.size[0],
            "weight_bytes_after": self.size[1],
            "seconds": round(self.seconds, 1),
            "tuning": self._tuning(),
            "layer_errors": self.layer_errors,
            "module_errors": self.errors,
        }
        (directory / FILE_NAME).write_text(json.dumps(content, indent=2) + "\n")

    def _tuning(self) -> dict[str, Any] | None:
        if self.tuning is None:
            return None
        first, last = self.tuning.divergences
        return {
            "steps": self.tuning.steps,
            "perplexity_before_tuning": self.tuning.perplexity,
            "divergence_first_step": first,
            "divergence_last_step": last,
        }

    def table(self) -> str:
        (before, after), (size_before, size_after) = self.perplexity, self.size
        lines = [
            f"{'':<16}{'before':>12}{'after':>12}{'change':>10}",
            f"{'perplexity':<16}{before:>12.3f}{after:>12.3f}{after / before - 1:>+10.2%}",
            f"{'weights, MB':<16}{size_before / 1e6:>12.1f}{size_after / 1e6:>12.1f}{size_after / size_before:>9.2f}x",
            f"perplexity on {self.num_tokens} tokens of {self.evaluation}",
        ]
        if self.tuning is not None:
            untuned = self.tuning.perplexity
            steps, change = self.tuning.steps, untuned / before - 1
            lines.append(f"before {steps} steps of tuning the whole model it was {untuned:.3f}, {change:+.2%}")
        return "\n".join(lines)


def perplexity(log_likelihood: float, num_tokens: int) -> float:
    return math.exp(-log_likelihood / num_tokens)
