"""Trains a quantized model, as a whole, to predict what the original does.

Rounding minimizes the error of each module's own output, and the remaining errors add up. Here scales and norms are
trained together to bring the whole model's predictions close to the original's. Chen et al., "EfficientQAT: Efficient
Quantization-Aware Training for Large Language Models" (2024), train scales end to end in the same way (E2E-QP), on the
text itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.quantize.model.decoder import Decoder
from pagewire.quantize.model.student import QuantizedState, Student
from pagewire.quantize.training.distillation import Divergence
from pagewire.quantize.training.training import Descent, activation_bytes, batches

STEPS = 60
TOKENS_PER_STEP = 4096
RATE = 3e-3  # relative change of a scale or a norm's weight in one of the first steps

TOKENS_PER_PASS = 1024  # tokens with activations held for the gradient: at least one sequence

# step from 1, KL of its tokens
TuneProgress = Callable[[int, float], None]


@dataclass(frozen=True)
class Tuned:
    """The result of tuning. state: the tuned weights. divergences: KL(original || quantized) per token, of each step
    before it changed anything.
    """

    state: QuantizedState
    divergences: list[float]


def needed_bytes(decoder: Decoder, num_sequences: int, length: int) -> int:
    """Estimates the bytes of weights, activations of a pass, and the original's hidden states."""
    config, size = decoder.source.config, decoder.source.dtype.itemsize
    # The weight and its gradient; the code twice, as it was and without its zero.
    weights = decoder.weight_bytes() // size * (2 * size + 2)
    activations = max(TOKENS_PER_PASS, length) * config.num_layers * activation_bytes(decoder)
    return weights + activations + num_sequences * length * config.hidden_size * size


@torch.no_grad()
def tune(
    decoder: Decoder, state: QuantizedState, tokens: Tensor, targets: Tensor, num_steps: int, progress: TuneProgress
) -> Tuned:
    """Trains the quantized model as a whole. tokens int64 [num_sequences, length]; targets [num_sequences, length,
    hidden_size], the original's last hidden states after the norm. Raises StartupError where training breaks
    down.
    """
    divergences = []
    picked = batches(len(tokens), max(1, TOKENS_PER_STEP // tokens.shape[1]))
    with decoder.whole_model(state) as model:
        student = Student(model, state)
        divergence = Divergence(model.get_parameter("model.embed_tokens.weight" if decoder.tied else "lm_head.weight"))
        descent = Descent([(student.changes(), RATE)], num_steps)
        for step in range(num_steps):
            picks = next(picked)
            student.clear_gradients()
            passes = picks.split(max(1, TOKENS_PER_PASS // tokens.shape[1]))
            total = sum(_add_gradients(decoder, divergence, tokens[part], targets[part]) for part in passes)
            student.take_gradients()
            divergences.append(total / (len(picks) * (tokens.shape[1] - 1)))
            _check(divergences[-1], student, step)
            descent.step()
            student.put()
            progress(step + 1, divergences[-1])
        return Tuned(student.state(), divergences)


def _add_gradients(decoder: Decoder, divergence: Divergence, tokens: Tensor, targets: Tensor) -> float:
    """Returns the divergence, summed over these tokens, and adds its gradients to the parameters'."""
    with torch.enable_grad():
        # A sequence's first token has no context: anything may follow it.
        states = decoder.last_states(tokens)[:, 1:].flatten(0, 1)
    total, gradient = divergence(targets[:, 1:].flatten(0, 1).to(decoder.device), states.detach())
    states.backward(gradient)
    return total.item()


def _check(divergence: float, student: Student, step: int) -> None:
    if not (math.isfinite(divergence) and student.is_finite()):
        raise StartupError(
            f"tuning broke down at step {step + 1}: the divergence from the original is {divergence}, with gradients "
            "that are not finite; leave tuning out with --tune-steps 0, or use other calibration text"
        )
