"""The common part of decoder-only language models with any kind of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pagewire.services.executor.layers.attention.self_attention import SelfAttention
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import Linear, StreamUpdate
from pagewire.services.executor.layers.mlp import MLP
from pagewire.services.executor.layers.norm import LayerNorm, RMSNorm
from pagewire.services.executor.layers.sums import JointSum
from pagewire.services.executor.models.protocol import Leaf, OwnModel
from pagewire.services.executor.parallel.stage import WHOLE, Stage
from pagewire.services.executor.step.step_context import StepContext


class Layer(Protocol):
    """One of a model's layers."""

    def __call__(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        """Adds hidden, the previous layer's output, to the stream `residual` in place; returns its own output.

        All are [num_tokens, hidden_size].
        """

    def leaves(self) -> Iterator[Leaf]: ...


class Attention(Protocol):
    """The first half of a layer."""

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""

    def leaves(self) -> Iterator[Leaf]: ...


class FeedForward(Protocol):
    """The second half of a layer."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""

    def leaves(self) -> Iterator[Leaf]: ...


class Observer(Protocol):
    """Observes the target's forward pass for a drafting head."""

    def see(self, layer_idx: int, stream: Callable[[], Tensor], context: StepContext) -> None:
        """Observes the stream before each layer. stream: gives the layer's input, [num_tokens, hidden_size]."""

    def end(self, hidden: Tensor, context: StepContext) -> None:
        """Observes the output of the last norm, the input of the head, [num_tokens, hidden_size]."""


class CausalModel(OwnModel):
    """Embedding, layers, norm and head. A model's constructor makes them, by the names in its checkpoints."""

    embed: Embedding
    layers: Sequence[Layer]
    norm: RMSNorm | LayerNorm
    lm_head: Linear | None  # None: the embedding is the head
    head_name: str = "lm_head"  # its name in the checkpoint
    hidden_dtype: torch.dtype | None = None  # of what layers give; None: the model's
    stream_dtype: torch.dtype | None = None  # of the residual stream; likewise
    observer: Observer | None = None
    arriving: Callable[[Sequence[Layer]], Iterable[Layer]] = iter  # yields each layer when its weights are there
    stage: Stage = WHOLE  # `layers` are its layers; those of other stages take no memory

    def leaves(self) -> Iterator[Leaf]:
        if self.stage.is_first or (self.stage.is_last and self.lm_head is None):
            yield self.embed
        for layer in self.layers:
            yield from layer.leaves()
        if self.stage.is_last:
            yield self.norm
            if self.lm_head is not None:
                yield self.lm_head

    def embedded(self, input_ids: Tensor, context: StepContext) -> Tensor:
        """Returns the input of the first layer."""
        return self.embed(input_ids)

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        stream = context.stream
        if stream is None:
            return self.decode(self.embedded(input_ids, context), context)
        if self.stage.is_first:
            stream.residual.zero_()
            hidden = self.through(self.embedded(input_ids, context), stream.residual, context)
        else:
            hidden = self.through(stream.hidden, stream.residual, context)
        return self.normed(hidden, stream.residual, context) if self.stage.is_last else stream.hidden.copy_(hidden)

    def decode(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Computes `forward` from embeddings [num_tokens, hidden_size]."""
        residual = torch.zeros_like(hidden, dtype=self.stream_dtype)
        return self.normed(self.through(hidden, residual, context), residual, context)

    def normed(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        """Computes the part behind the last layer."""
        normed = self.norm.add(hidden, residual)
        if self.observer is not None:
            self.observer.end(normed, context)
        return normed

    def through(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        """Returns the output of this stage's layers. hidden: the output of earlier stages."""
        for layer_idx, layer in enumerate(self.arriving(self.layers)):
            if self.observer is not None:
                self.observer.see(layer_idx, partial(torch.add, residual, hidden), context)
            hidden = layer(hidden, residual, context)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.embed.project(hidden) if self.lm_head is None else self.lm_head(hidden)

    def ignored(self, name: str) -> bool:
        tied_copy = self.lm_head is None and name == f"{self.head_name}.weight"
        return tied_copy or name.endswith("rotary_emb.inv_freq")


class PreNormLayer:
    """Attention, then feed-forward, each of the normalised stream."""

    _products_take_norms: bool  # determined by the first step

    __slots__ = ("_products_take_norms", "attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(
        self,
        input_norm: RMSNorm | LayerNorm,
        attention: Attention,
        post_attention_norm: RMSNorm | LayerNorm,
        mlp: FeedForward,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def __call__(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        if not hasattr(self, "_products_take_norms"):  # unset until then, so that loaded models are alike
            self._products_take_norms = self._find_products()
        if self._products_take_norms and context.adapter_slots is None:
            return self._in_products(hidden, residual, context)
        hidden = self.attention(self.input_norm.add(hidden, residual), context)
        return self.mlp(self.post_attention_norm.add(hidden, residual))

    def _find_products(self) -> bool:
        """Returns whether both halves begin with a product that also computes the norm; weights must be installed."""
        if not (isinstance(self.input_norm, RMSNorm) and isinstance(self.post_attention_norm, RMSNorm)):
            return False
        if not (isinstance(self.attention, SelfAttention) and isinstance(self.mlp, MLP)):
            return False
        return self.attention.takes_norm and self.mlp.takes_norm

    def _in_products(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        assert isinstance(self.input_norm, RMSNorm) and isinstance(self.post_attention_norm, RMSNorm)
        assert isinstance(self.attention, SelfAttention) and isinstance(self.mlp, MLP)
        # A kernel cannot write memory that its other programs read, so two buffers alternate.
        between = torch.empty_like(residual)
        hidden = self.attention.after_norm(self.input_norm, hidden, StreamUpdate(residual, between), context)
        return self.mlp.after_norm(self.post_attention_norm, hidden, StreamUpdate(between, residual))

    def leaves(self) -> Iterator[Leaf]:
        yield self.input_norm
        yield from self.attention.leaves()
        yield self.post_attention_norm
        yield from self.mlp.leaves()


class ParallelLayer:
    """Attention and feed-forward, both of the stream at the layer's input."""

    __slots__ = ("attention", "mlp", "mlp_norm", "norm", "sum")

    def __init__(self, norm: LayerNorm, attention: SelfAttention, mlp: MLP, mlp_norm: LayerNorm | None = None) -> None:
        """mlp_norm: None: both halves have the same norm."""
        self.norm = norm
        self.attention = attention
        self.mlp = mlp
        self.mlp_norm = mlp_norm
        self.sum = JointSum(attention.o, mlp.down)

    def __call__(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        normed = self.norm.add(hidden, residual)
        output = self.attention(normed, context)
        return self.sum(output.add_(self.mlp(normed if self.mlp_norm is None else self.mlp_norm(residual))))

    def leaves(self) -> Iterator[Leaf]:
        yield self.norm
        yield from self.attention.leaves()
        if self.mlp_norm is not None:
            yield self.mlp_norm
        yield from self.mlp.leaves()
