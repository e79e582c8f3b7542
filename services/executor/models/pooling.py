"""Vectors of requests: the pooling of tokens, and the meaning of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pagewire.services.executor.layers.pooling import (
    Pool,
    Pooler,
    Spans,
    first_token,
    last_token,
    maximum,
    mean,
    mean_sqrt_len,
    weighted_mean,
)
from pagewire.services.executor.models.protocol import Classifier

# By sentence-transformers' names of modes, in its order of concatenation.
POOLS: dict[str, Pool] = {
    "cls": first_token,
    "max": maximum,
    "mean": mean,
    "mean_sqrt_len_tokens": mean_sqrt_len,
    "weightedmean": weighted_mean,
    "lasttoken": last_token,
}
# The pooled vector needs the last token only: prompts may be computed in pieces, and from cached tokens.
PIECEWISE = frozenset({"lasttoken"})


@dataclass(frozen=True)
class Pooling:
    """The task of a served model: text, or vectors of `size` numbers."""

    kind: str  # generate, embed or classify
    pooler: Pooler
    size: int = 0  # 0: hidden_size
    labels: tuple[str, ...] = ()  # of a classifier, [size]
    whole_prompts: bool = False  # all of a prompt's tokens must be in one step
    max_model_len: int | None = None  # if shorter than what the model's positions reach

    @property
    def generates(self) -> bool:
        return self.kind == "generate"


LAST_STATE = Pooling("generate", last_token)


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer behind pooling, in fp32."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(functional.linear(x, self.weight, self.bias))


class EmbeddingPooler:
    """The concatenated pools, then layers, then the normalisation to length 1, if any."""

    def __init__(self, pools: Sequence[Pool], layers: Sequence[DenseLayer], *, normalizes: bool) -> None:
        self._pools = tuple(pools)
        self._layers = tuple(layers)
        self._normalizes = normalizes

    def __call__(self, hidden: Tensor, spans: Spans) -> Tensor:
        pooled = torch.cat([pool(hidden, spans) for pool in self._pools], dim=-1)
        for layer in self._layers:
            pooled = layer(pooled)
        return functional.normalize(pooled, dim=-1) if self._normalizes else pooled


class ClassifierPooler:
    """The scores of a classification head."""

    def __init__(self, classifier: Classifier, activation: Callable[[Tensor], Tensor]) -> None:
        self._classifier = classifier
        self._activation = activation

    def __call__(self, hidden: Tensor, spans: Spans) -> Tensor:
        return self._activation(self._classifier.classify(hidden, spans).float())
