"""Quantizes a model layer by layer, and the text for measuring goes through the original and the quantized one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.quantized import GroupedWeight
from quantize.decoder import Decoder
from quantize.layer import STAGES, LayerQuantizer, Method
from quantize.layouts import awq_config, awq_tensors, gptq_config, gptq_tensors
from quantize.output import CheckpointWriter
from quantize.report import Report, perplexity

NUM_MODULES = sum(len(stage.modules) for stage in STAGES)  # of a layer

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Text:
    """Tokens int64 [num_sequences, length], and where they are from."""

    tokens: Tensor
    description: str


@torch.inference_mode()
def quantize(
    decoder: Decoder,
    method: Method,
    calibration: Text | None,
    evaluation: Text,
    directory: Path,
    settings: dict[str, Any],
    progress: Progress,
) -> Report:
    """Writes the quantized checkpoint and its report to `directory`.

    calibration: None for a method that needs none. progress is told of each module done, and its error.
    """
    started = time.monotonic()
    with CheckpointWriter(directory) as writer:
        run = _Run(decoder, method, writer, progress)
        log_likelihoods = run.run(calibration, evaluation)
    decoder.source.write_files(directory, quantization_config(method))
    num_tokens = evaluation.tokens[:, 1:].numel()
    before, after = (perplexity(log_likelihood, num_tokens) for log_likelihood in log_likelihoods)
    report = Report(
        settings=settings,
        calibration="none" if calibration is None else calibration.description,
        evaluation=evaluation.description,
        num_tokens=num_tokens,
        perplexity=(before, after),
        size=(decoder.weight_bytes(), writer.total_bytes),
        errors=run.errors,
        seconds=time.monotonic() - started,
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
    def __init__(self, decoder: Decoder, method: Method, writer: CheckpointWriter, progress: Progress) -> None:
        self._decoder, self._method, self._writer, self._progress = decoder, method, writer, progress
        self.errors: dict[str, float] = {}

    def run(self, calibration: Text | None, evaluation: Text) -> tuple[float, float]:
        """The log likelihoods of the evaluation text before and after."""
        decoder = self._decoder
        self._copy(["model.embed_tokens.weight"])
        before = decoder.embed(evaluation.tokens)
        after = before.clone()
        inputs = None if calibration is None else decoder.embed(calibration.tokens)
        for index in range(decoder.num_layers):
            with decoder.layer(index) as layer:
                decoder.advance(layer, index, before)
                self._quantize_layer(layer, index, inputs)
                decoder.advance(layer, index, after)
                if inputs is not None and index + 1 < decoder.num_layers:
                    decoder.advance(layer, index, inputs)
        self._copy(["model.norm.weight", *([] if decoder.tied else ["lm_head.weight"])])
        for name in decoder.attention_scales():
            self._writer.write(name, decoder.read(name, torch.float32))
        tokens = evaluation.tokens
        likelihood_before, likelihood_after = decoder.log_likelihoods([before, after], tokens)
        return likelihood_before, likelihood_after

    def _quantize_layer(self, layer: nn.Module, index: int, inputs: Tensor | None) -> None:
        decoder, prefix = self._decoder, f"model.layers.{index}."

        def progress(module: str, error: float) -> None:
            self.errors[prefix + module] = error
            self._progress(prefix + module, error)

        def inputs_of(module: nn.Linear) -> Any:
            assert inputs is not None
            return decoder.inputs_of(layer, index, module, inputs)

        quantizer = LayerQuantizer(layer, self._method, decoder.source.config.head_dim)
        quantizer.run(inputs_of, progress)
        for name, parameter in layer.named_parameters():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and module in quantizer.weights:
                for suffix, tensor in self._tensors(quantizer.weights[module]).items():
                    self._writer.write(f"{prefix}{module}.{suffix}", tensor)
            else:
                self._writer.write(prefix + name, parameter.data)

    def _tensors(self, weight: GroupedWeight) -> dict[str, Tensor]:
        return awq_tensors(weight) if self._method.name == "awq" else gptq_tensors(weight)

    def _copy(self, names: list[str]) -> None:
        for name in names:
            self._writer.write(name, self._decoder.read(name))
