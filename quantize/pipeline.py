"""Quantizes a model layer by layer, and runs the evaluation text through the original and the quantized one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.kernels.quantized import GroupedWeight
from pagewire.quantize.model.decoder import Decoder
from pagewire.quantize.model.student import QuantizedState, Student
from pagewire.quantize.output import CheckpointWriter
from pagewire.quantize.progress import Progress
from pagewire.quantize.report import Report, Tuning, perplexity
from pagewire.quantize.rounding.layer import LayerQuantizer, Method
from pagewire.quantize.rounding.layouts import LAYOUTS, awq_config, gptq_config
from pagewire.quantize.training.tune import tune
from pagewire.quantize.training.tune_layer import tune_layer


@dataclass(frozen=True)
class TuneSteps:
    """The number of tuning steps for each layer once it is quantized, and for the whole model at the end."""

    layer: int
    model: int


@dataclass(frozen=True)
class Text:
    """Tokens int64 [num_sequences, length], and their origin."""

    tokens: Tensor
    description: str


@torch.no_grad()
def quantize(
    decoder: Decoder,
    method: Method,
    calibration: Text | None,
    evaluation: Text,
    steps: TuneSteps,
    directory: Path,
    settings: dict[str, Any],
    progress: Progress,
) -> Report:
    """Writes the quantized checkpoint and its report to `directory`.

    calibration: None for a method that needs none; nothing is tuned then.
    """
    started = time.monotonic()
    with CheckpointWriter(directory) as writer:
        run = _Run(decoder, method, steps, writer, progress)
        perplexities = run.run(calibration, evaluation)
    decoder.source.write_files(directory, quantization_config(method))
    report = Report(
        settings=settings,
        calibration="none" if calibration is None else calibration.description,
        evaluation=evaluation.description,
        num_tokens=evaluation.tokens[:, 1:].numel(),
        perplexity=perplexities,
        size=(decoder.weight_bytes(), writer.total_bytes),
        errors=run.errors,
        seconds=time.monotonic() - started,
        layer_errors=run.layer_errors,
        tuning=run.tuning,
    )
    report.write(directory)
    return report


def quantization_config(method: Method) -> dict[str, Any]:
    """Returns the checkpoint's quantization config for config.json."""
    if method.name == "awq":
        return awq_config(method.grid)
    if method.name == "rtn":
        return gptq_config(method.grid, desc_act=False, damp=0.0)
    desc_act = method.gptq.desc_act and not method.gptq.static_groups
    return gptq_config(method.grid, desc_act=desc_act, damp=method.gptq.damp)


class _Run:
    """One pass over the layers, and tuning after it. `errors`, `layer_errors`, `tuning`: for the report."""

    def __init__(
        self, decoder: Decoder, method: Method, steps: TuneSteps, writer: CheckpointWriter, progress: Progress
    ) -> None:
        self._decoder, self._method, self._steps = decoder, method, steps
        self._writer, self._progress = writer, progress
        self.errors: dict[str, float] = {}
        self.layer_errors: list[tuple[float, float]] = []
        self.tuning: Tuning | None = None

    def run(self, calibration: Text | None, evaluation: Text) -> tuple[float, float]:
        """Returns the perplexity of the evaluation text before and after."""
        decoder = self._decoder
        self._copy(["model.embed_tokens.weight"])
        before = decoder.embed(evaluation.tokens)
        after = before.clone()
        inputs = None if calibration is None else decoder.embed(calibration.tokens)
        # The original's hidden states of the calibration text.
        tuned = self._steps.layer or self._steps.model
        targets = inputs.clone() if inputs is not None and tuned else None
        state: QuantizedState = {}
        for index in range(decoder.num_layers):
            with decoder.layer(index) as layer:
                for hidden in (before, targets):
                    if hidden is not None:
                        decoder.advance(layer, index, hidden)
                quantized = self._quantize_layer(layer, index, inputs, targets)
                decoder.advance(layer, index, after)
                if inputs is not None and index + 1 < decoder.num_layers:
                    decoder.advance(layer, index, inputs)
            if self._steps.model:
                state |= quantized
            else:
                self._write(quantized)
        perplexities = self._perplexity(before, evaluation.tokens), self._perplexity(after, evaluation.tokens)
        if self._steps.model:
            assert calibration is not None and targets is not None
            decoder.apply_norm(targets)
            del before, after, inputs
            state["model.norm.weight"] = decoder.read("model.norm.weight")
            state = self._tune(state, calibration.tokens, targets, perplexities[1])
            self._write(state)
            perplexities = perplexities[0], self._perplexity_of(state, evaluation.tokens)
        else:
            self._copy(["model.norm.weight"])
        self._copy([] if decoder.tied else ["lm_head.weight"])
        for name in decoder.attention_scales():
            self._writer.write(name, decoder.read(name, torch.float32))
        return perplexities

    def _quantize_layer(
        self, layer: nn.Module, index: int, inputs: Tensor | None, targets: Tensor | None
    ) -> QuantizedState:
        """Hidden states of the calibration text. inputs: before the quantized layer. targets: after the original."""
        decoder, prefix = self._decoder, f"model.layers.{index}."

        def progress(module: str, error: float) -> None:
            self.errors[prefix + module] = error
            self._progress.module(prefix + module, error)

        def inputs_of(module: nn.Linear) -> Any:
            assert inputs is not None
            return decoder.inputs_of(layer, index, module, inputs)

        quantizer = LayerQuantizer(layer, self._method, decoder.source.config.head_dim)
        quantizer.run(inputs_of, progress)
        state: QuantizedState = {name: parameter.data for name, parameter in layer.named_parameters()}
        state |= {f"{module}.weight": weight for module, weight in quantizer.weights.items()}
        if self._steps.layer:
            assert inputs is not None and targets is not None
            positions = {f"{module}.weight": found for module, found in quantizer.positions.items()}
            student = Student(layer, state, positions)
            forward = partial(decoder.forward, layer, index)
            errors = tune_layer(layer, student, forward, inputs, targets, self._steps.layer)
            self.layer_errors.append(errors)
            self._progress.layer(index, *errors)
            state = student.state()
        return {prefix + name: value for name, value in state.items()}

    def _tune(self, state: QuantizedState, tokens: Tensor, targets: Tensor, untuned: float) -> QuantizedState:
        self._progress.tuning(self._steps.model)
        tuned = tune(self._decoder, state, tokens, targets, self._steps.model, self._progress.step)
        divergences = tuned.divergences
        self.tuning = Tuning(self._steps.model, (divergences[0], divergences[-1]), untuned)
        return tuned.state

    def _perplexity(self, hidden: Tensor, tokens: Tensor, state: QuantizedState | None = None) -> float:
        """hidden: hidden states after the last layer, which are overwritten."""
        self._decoder.apply_norm(hidden, state)
        return perplexity(self._decoder.log_likelihood(hidden, tokens), tokens[:, 1:].numel())

    def _perplexity_of(self, state: QuantizedState, tokens: Tensor) -> float:
        """Returns the perplexity of the written model, computed layer by layer."""
        hidden = self._decoder.embed(tokens)
        for index in range(self._decoder.num_layers):
            with self._decoder.layer(index, state) as layer:
                self._decoder.advance(layer, index, hidden)
        return self._perplexity(hidden, tokens, state)

    def _write(self, state: QuantizedState) -> None:
        tensors_of = LAYOUTS[self._method.name].tensors
        for name, value in state.items():
            if isinstance(value, GroupedWeight):
                for suffix, tensor in tensors_of(value).items():
                    self._writer.write(f"{name.removesuffix('weight')}{suffix}", tensor)
            else:
                self._writer.write(name, value)

    def _copy(self, names: list[str]) -> None:
        for name in names:
            self._writer.write(name, self._decoder.read(name))
