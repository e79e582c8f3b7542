"""A model, one decoder layer at a time: memory never holds more than a layer, the embedding or the head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pagewire.kernels.quantized import GroupedWeight
from pagewire.quantize.model.source import Source
from pagewire.quantize.model.student import QuantizedState
from pagewire.quantize.rounding.activations import InputStatistics
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.weights.kv_scales import is_attention_scale

_TOKENS_PER_BATCH = 4096
_TOKENS_PER_HEAD = 256  # logits of a large vocabulary take the most memory


class _InputSeen(Exception):
    """Ends a forward pass when its further results are not needed."""


class Decoder:
    """The architecture's model in transformers, without weights, and the checkpoint that has them.

    Hidden states are [num_sequences, length, hidden_size] in the model's dtype, in host memory; every sequence starts
    at position 0.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self.source, self.device = source, device
        self._weights = source.checkpoint.weights()
        keys = {key: value for key, value in source.keys.items() if key != "model_type"}
        config = AutoConfig.for_model(source.keys["model_type"], **keys)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(
                config, dtype=source.dtype, attn_implementation="sdpa"
            ).eval()
        self._rotary = type(self._model.model.rotary_emb)(config=config).to(device)
        self.tied = source.config.tie_word_embeddings
        self._check_tensors()

    def _check_tensors(self) -> None:
        """Raises ModelLoadError naming a tensor that is missing, unexpected or of the wrong shape."""
        expected = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        if self.tied:
            expected.pop("lm_head.weight")
        found = self._weights.shapes
        for name, shape in expected.items():
            if name not in found:
                raise ModelLoadError(f"{self.source.path}: tensor {name} is missing")
            if found[name] != shape:
                raise ModelLoadError(
                    f"{self.source.path}: tensor {name}: expected shape {list(shape)}, found {list(found[name])}"
                )
        for name in found:
            if name not in expected and not (
                is_attention_scale(name) or name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
            ):
                raise ModelLoadError(
                    f"{self.source.path}: tensor {name} is unexpected in {self.source.config.architecture}"
                )

    @property
    def num_layers(self) -> int:
        return self.source.config.num_layers

    def weight_bytes(self) -> int:
        """Returns the bytes in the model's dtype; a head that is the embedding counts once."""
        parameters = self._model.named_parameters()
        return sum(parameter.nbytes for name, parameter in parameters if not (self.tied and name == "lm_head.weight"))

    def layer_weights(self) -> int:
        """Returns the number of weights in a decoder layer; all layers are alike."""
        return sum(parameter.numel() for parameter in self._model.model.layers[0].parameters())

    def attention_scales(self) -> list[str]:
        """Tensors that belong to the checkpoint, but not to the model."""
        return [name for name in self._weights.shapes if is_attention_scale(name)]

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Returns one tensor, in host memory and in the model's dtype."""
        tensor = torch.empty(self._weights.shapes[name], dtype=dtype or self.source.dtype)
        self._weights.read_into(name, tensor)
        return tensor

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns int64 [num_sequences, length] -> hidden states before the first layer"""
        return F.embedding(tokens, self.read("model.embed_tokens.weight"))

    @contextmanager
    def layer(self, index: int, state: QuantizedState | None = None) -> Iterator[nn.Module]:
        """Yields a decoder layer with the weights of `state`, or the checkpoint's where it has none."""
        layer = self._model.model.layers[index]
        layer.to_empty(device="cpu")
        for name, parameter in layer.named_parameters():
            self._set(parameter, f"model.layers.{index}.{name}", state or {})
        layer.to(self.device)
        try:
            yield layer
        finally:
            layer.to("meta")

    @contextmanager
    def whole_model(self, state: QuantizedState | None = None) -> Iterator[nn.Module]:
        """Yields the causal language model with the weights of `state`, or the checkpoint's where it has none."""
        model = self._model
        model.to_empty(device=self.device)
        model.tie_weights()
        for name, parameter in model.named_parameters():  # shared parameters come once, as the embedding
            self._set(parameter, name, state or {})
        rotary, model.model.rotary_emb = model.model.rotary_emb, self._rotary
        try:
            yield model
        finally:
            model.model.rotary_emb = rotary
            model.to("meta")

    def _set(self, parameter: nn.Parameter, name: str, state: QuantizedState) -> None:
        value = state.get(name)
        if value is None:
            value = self.read(name)
        parameter.data.copy_(value.dequantize() if isinstance(value, GroupedWeight) else value)

    def last_states(self, tokens: Tensor) -> Tensor:
        """Returns int64 [num_sequences, length] -> hidden states after the last norm, on the device and all at once.

        Only within `whole_model`.
        """
        model = self._model.model
        hidden = F.embedding(tokens.to(self.device), model.embed_tokens.weight)
        for index, layer in enumerate(model.layers):
            hidden = self.forward(layer, index, hidden)
        normed: Tensor = model.norm(hidden)
        return normed

    def advance(self, layer: nn.Module, index: int, hidden: Tensor) -> None:
        """Replaces hidden states before a layer by those after it."""
        for batch in _batches(hidden):
            batch.copy_(self.forward(layer, index, batch))

    def inputs_of(self, layer: nn.Module, index: int, module: nn.Linear, hidden: Tensor) -> InputStatistics:
        """Returns statistics of the inputs of a module within a layer, given the hidden states before the layer."""
        statistics = InputStatistics(module.in_features, self.device)

        def look(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            statistics.add(arguments[0])
            raise _InputSeen

        hook = module.register_forward_pre_hook(look)
        try:
            for batch in _batches(hidden):
                try:
                    self.forward(layer, index, batch)
                except _InputSeen:
                    pass
        finally:
            hook.remove()
        return statistics

    def forward(self, layer: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """Hidden states before a layer -> after it, on the device and all at once."""
        length = hidden.shape[1]
        positions = torch.arange(length, device=self.device).unsqueeze(0)
        hidden = hidden.to(self.device)
        output: Any = layer(
            hidden,
            attention_mask=self._mask(index, length),
            position_ids=positions,
            position_embeddings=self._rotary(hidden, positions),
        )
        return output

    def _mask(self, index: int, length: int) -> Tensor | None:
        """bool [1, 1, length, length], True where a query sees a key; None for causal attention without a window."""
        window = self.source.config.sliding_windows[index]
        if not 0 < window < length:
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=self.device).tril().triu(1 - window)
        return seen[None, None]

    def apply_norm(self, hidden: Tensor, state: QuantizedState | None = None) -> None:
        """Replaces hidden states after the last layer by those after the last norm: `state`'s, if it has one."""
        norm = self._model.model.norm
        norm.to_empty(device=self.device)
        self._set(norm.weight, "model.norm.weight", state or {})
        for batch in _batches(hidden):
            batch.copy_(norm(batch.to(self.device)))
        norm.to("meta")

    def log_likelihood(self, hidden: Tensor, tokens: Tensor) -> float:
        """Returns the sum of log p(token | tokens before it) over all tokens except the first of each sequence.

        hidden: hidden states after the last norm.
        """
        head = self.read("model.embed_tokens.weight" if self.tied else "lm_head.weight").to(self.device)
        states, targets = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        total = 0.0
        for start in range(0, len(states), _TOKENS_PER_HEAD):
            part = slice(start, start + _TOKENS_PER_HEAD)
            logits = states[part].to(self.device) @ head.T
            total -= F.cross_entropy(logits.float(), targets[part].to(self.device), reduction="sum").item()
        return total


def _batches(hidden: Tensor) -> Iterator[Tensor]:
    size = max(1, _TOKENS_PER_BATCH // hidden.shape[1])
    for start in range(0, len(hidden), size):
        yield hidden[start : start + size]
