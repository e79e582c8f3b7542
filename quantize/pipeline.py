"""Quantizes a model layer by layer, and the text for measuring goes through the original and the quantized one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.quantized import GroupedWeight
from quantize.decoder import Decoder
from quantize.layer import LayerQuantizer, Method
from quantize.layouts import awq_config, awq_tensors, gptq_config, gptq_tensors
from quantize.output import CheckpointWriter
from quantize.progress import Progress
from quantize.report import Report, Tuning, perplexity
from quantize.student import QuantizedState
from quantize.tune import tune


@dataclass(frozen=True)
class Text:
    """Tokens int64 [num_sequences, length], and where they are from."""

    tokens: Tensor
    description: str


@torch.no_grad()
def quantize(
    decoder: Decoder,
    method: Method,
    calibration: Text | None,
    evaluation: Text,
    num_tune_steps: int,
    directory: Path,
    settings: dict[str, Any],
    progress: Progress,
) -> Report:
    """Writes the quantized checkpoint and its report to `directory`.

    calibration: None for a method that needs none; num_tune_steps is 0 then.
    """
    started = time.monotonic()
    with CheckpointWriter(directory) as writer:
        run = _Run(decoder, method, num_tune_steps, writer, progress)
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
        tuning=run.tuning,
    )
    report.write(directory)
    return report


def quantization_config(method: Method) -> dict[str, Any]:
    """What config.json says of the checkpoint."""
    if method.name == "awq":
        return awq_config(method.grid)
    if method.name == "rtn":
        return gptq_config(method.grid, desc_act=False, damp=0.0)
    desc_act = method.gptq.desc_act and not method.gptq.static_groups
    return gptq_config(method.grid, desc_act=desc_act, damp=method.gptq.damp)


class _Run:
    """One pass over the layers, and tuning after it. `errors`, `tuning`: what the report says of them."""

    def __init__(
        self, decoder: Decoder, method: Method, num_steps: int, writer: CheckpointWriter, progress: Progress
    ) -> None:
        self._decoder, self._method, self._num_steps = decoder, method, num_steps
        self._writer, self._progress = writer, progress
        self.errors: dict[str, float] = {}
        self.tuning: Tuning | None = None

    def run(self, calibration: Text | None, evaluation: Text) -> tuple[float, float]:
        """The perplexity of the evaluation text before and after."""
        decoder = self._decoder
        self._copy(["model.embed_tokens.weight"])
        before = decoder.embed(evaluation.tokens)
        after = before.clone()
        inputs = None if calibration is None else decoder.embed(calibration.tokens)
        # What the original makes of the calibration text.
        targets = inputs.clone() if inputs is not None and self._num_steps else None
        state: QuantizedState = {}
        for index in range(decoder.num_layers):
            with decoder.layer(index) as layer:
                for hidden in (before, targets):
                    if hidden is not None:
                        decoder.advance(layer, index, hidden)
                quantized = self._quantize_layer(layer, index, inputs)
                decoder.advance(layer, index, after)
                if inputs is not None and index + 1 < decoder.num_layers:
                    decoder.advance(layer, index, inputs)
            if targets is None:
                self._write(quantized)
            else:
                state |= quantized
        perplexities = self._perplexity(before, evaluation.tokens), self._perplexity(after, evaluation.tokens)
        if targets is not None:
            assert calibration is not None
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

    def _quantize_layer(self, layer: nn.Module, index: int, inputs: Tensor | None) -> QuantizedState:
        decoder, prefix = self._decoder, f"model.layers.{index}."

        def progress(module: str, error: float) -> None:
            self.errors[prefix + module] = error
            self._progress.module(prefix + module, error)

        def inputs_of(module: nn.Linear) -> Any:
            assert inputs is not None
            return decoder.inputs_of(layer, index, module, inputs)

        quantizer = LayerQuantizer(layer, self._method, decoder.source.config.head_dim)
        quantizer.run(inputs_of, progress)
        state: QuantizedState = {prefix + name: parameter.data for name, parameter in layer.named_parameters()}
        return state | {f"{prefix}{module}.weight": weight for module, weight in quantizer.weights.items()}

    def _tune(self, state: QuantizedState, tokens: Tensor, targets: Tensor, untuned: float) -> QuantizedState:
        self._progress.tuning(self._num_steps)
        tuned = tune(self._decoder, state, tokens, targets, self._num_steps, self._progress.step)
        divergences = tuned.divergences
        self.tuning = Tuning(self._num_steps, (divergences[0], divergences[-1]), untuned)
        return tuned.state

    def _perplexity(self, hidden: Tensor, tokens: Tensor, state: QuantizedState | None = None) -> float:
        """hidden: after the last layer; is overwritten."""
        self._decoder.apply_norm(hidden, state)
        return perplexity(self._decoder.log_likelihood(hidden, tokens), tokens[:, 1:].numel())

    def _perplexity_of(self, state: QuantizedState, tokens: Tensor) -> float:
        """Layer by layer, of what is written."""
        hidden = self._decoder.embed(tokens)
        for index in range(self._decoder.num_layers):
            with self._decoder.layer(index, state) as layer:
                self._decoder.advance(layer, index, hidden)
        return self._perplexity(hidden, tokens, state)

    def _write(self, state: QuantizedState) -> None:
        tensors_of = awq_tensors if self._method.name == "awq" else gptq_tensors
        for name, value in state.items():
            if isinstance(value, GroupedWeight):
                for suffix, tensor in tensors_of(value).items():
                    self._writer.write(f"{name.removesuffix('weight')}{suffix}", tensor)
            else:
                self._writer.write(name, value)

    def _copy(self, names: list[str]) -> None:
        for name in names:
            self._writer.write(name, self._decoder.read(name))
