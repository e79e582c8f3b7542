"""Trains a quantized decoder layer to give the outputs that the original layer gives for its own inputs.

Rounding has made each module's output close to its ideal for the present inputs. Here codes, scales, norms and biases
of the whole layer are trained together and compensate for the errors of the layers before: the inputs are those of the
quantized model, the targets are the original's. Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for
the Quantization of LLMs" (2024), and Chen et al., "EfficientQAT" (2024, Block-AP), train layers in this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pagewire.errors import StartupError
from pagewire.quantize.model.decoder import Decoder
from pagewire.quantize.model.student import Student
from pagewire.quantize.training.training import Descent, activation_bytes, batches

STEPS = 100
TOKENS_PER_STEP = 2048
RATE = 2e-3  # of scales, norms and biases, as in `tune`
POSITION_RATE = 0.01  # of positions between codes, in codes: few weights move far enough to change their code

# The layer's outputs, given hidden states before it [num_sequences, length, hidden_size].
Forward = Callable[[Tensor], Tensor]


def needed_bytes(decoder: Decoder, num_sequences: int, length: int) -> int:
    """Estimates the bytes of a layer's weights, activations of a step, and the original's hidden states."""
    config, size = decoder.source.config, decoder.source.dtype.itemsize
    # The weight and its gradient; in float32 the position with its gradient and Adam's two means, and the same
    # again while they change.
    weights = decoder.layer_weights() * (2 * size + 32)
    activations = max(TOKENS_PER_STEP, length) * activation_bytes(decoder)
    return weights + activations + num_sequences * length * config.hidden_size * size


@torch.no_grad()
def tune_layer(
    layer: nn.Module, student: Student, forward: Forward, inputs: Tensor, targets: Tensor, num_steps: int
) -> tuple[float, float]:
    """Trains a layer. inputs, targets: [num_sequences, length, hidden_size], hidden states before the layer, and the
    wanted ones after it.

    The error is the squared distance from the target relative to the target's square, averaged over tokens: only the
    direction matters to the next norm. Returns the error of the first steps, and that of the same sequences at the end.
    Raises StartupError if training breaks down.
    """
    descent = Descent([(student.changes(), RATE), (student.positions(), POSITION_RATE)], num_steps)
    picked = batches(len(inputs), max(1, TOKENS_PER_STEP // inputs.shape[1]))
    shown: list[tuple[Tensor, float]] = []  # the sequences of the first steps, and their error
    for step in range(num_steps):
        picks = next(picked)
        student.clear_gradients()
        with torch.enable_grad():
            loss = _error(forward, inputs[picks], targets[picks])
        loss.backward()
        student.take_gradients()
        error = loss.item()
        if not (math.isfinite(error) and student.is_finite()):
            raise StartupError(
                f"tuning a layer broke down at step {step + 1}: its error is {error}, with gradients that are not "
                "finite; leave it out with --tune-layer-steps 0, or use other calibration text"
            )
        if len(shown) < -(-num_steps // 10):
            shown.append((picks, error))
        descent.step()
        student.put()
    layer.zero_grad()
    layer.requires_grad_(False)
    after = [_error(forward, inputs[picks], targets[picks]).item() for picks, _ in shown]
    return sum(error for _, error in shown) / len(shown), sum(after) / len(after)


def _error(forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
    # A sequence's first token has no context; its states are unlike all others.
    outputs = forward(inputs)[:, 1:].float()
    targets = targets[:, 1:].to(outputs.device).float()
    return ((outputs - targets).square().sum(dim=-1) / targets.square().sum(dim=-1).clamp(min=1e-30)).mean()
