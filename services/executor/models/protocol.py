"""The interface of models: for the code that runs one (`Model`) and the code that loads one (`OwnModel`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from pagewire.services.executor.config.model_config import ModelConfig
from pagewire.services.executor.layers.attention.paged_attention import PagedAttention
from pagewire.services.executor.layers.kv_spec import CacheSpec, CachingLayer
from pagewire.services.executor.layers.parts import SplitLayer, StoredPart
from pagewire.services.executor.layers.pooling import Spans
from pagewire.services.executor.layers.weights import WeightModule
from pagewire.services.executor.step.step_context import StepContext


class Classifier(Protocol):
    """A classification head."""

    num_labels: int

    def classify(self, hidden: Tensor, spans: Spans) -> Tensor:
        """hidden [num_tokens, hidden_size] of a step -> logits [V, num_labels] of the requests that are pooled"""

    def leaves(self) -> Iterator[Leaf]: ...


class Model(Protocol):
    """The model runner's view of a model; our own models and transformers' look the same."""

    config: ModelConfig
    capturable: bool  # whether CUDA graphs may contain its steps: its Python code never reads values
    generates: bool  # whether tokens can be sampled from it; an encoder only reads
    cache_order: Sequence[CacheSpec]  # caches of the layers of all stages, in order; empty: all layers are here

    @property
    def classifier(self) -> Classifier | None:
        """Returns its classification head, if it has one."""

    @property
    def caching_layers(self) -> Sequence[CachingLayer]:
        """Returns the layers that keep data between steps, in layer order; none in an encoder."""

    @property
    def attention_layers(self) -> list[PagedAttention]:
        """Returns the layers that keep keys and values."""

    @property
    def weight_bytes(self) -> int: ...

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        """input_ids int64 [num_tokens] -> hidden states after the last norm [num_tokens, hidden_size]"""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size], fp32 in our own models"""


class Leaf(Protocol):
    """A layer without inner layers. It may be a `WeightModule`, a `CachingLayer`, or have vectors only (norms)."""

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name of a dense tensor in the checkpoint, the memory of the required shape that it is written to)."""


@runtime_checkable
class OwnModel(Model, Protocol):
    """A model in our own code. It is made with uninitialised weights, which are then written through its leaves.

    A model defines `leaves()`, `forward()`, `compute_logits()` and the tensors it ignores; the rest follows from these.
    """

    capturable: bool = True
    generates: bool = True
    cache_order: Sequence[CacheSpec] = ()
    classifier: Classifier | None = None
    unsplit: str | None = None  # why its layers cannot be shared by ranks, if they cannot

    @abstractmethod
    def leaves(self) -> Iterator[Leaf]:
        """Returns all leaves, in the order of computation."""

    def finish_loading(self) -> None:
        """Computes derived weights. Called once, when all weights are loaded."""
        return

    def ignored(self, name: str) -> bool:
        """Returns whether a checkpoint may hold this tensor although the model does not use it."""
        return False

    @property
    def caching_layers(self) -> Sequence[CachingLayer]:
        return [leaf for leaf in self.leaves() if isinstance(leaf, CachingLayer)]

    @property
    def attention_layers(self) -> list[PagedAttention]:
        return [leaf for leaf in self.leaves() if isinstance(leaf, PagedAttention)]

    def modules(self) -> list[WeightModule]:
        """Returns the modules with a weight that may be quantized: embedding, linear layers and head."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, WeightModule)]

    def quantized_modules(self) -> list[WeightModule]:
        """Returns the modules that the loader reads, packs and installs; the others' weights are load targets."""
        return [module for module in self.modules() if any(shard.format is not None for shard in module.shards)]

    def load_targets(self) -> dict[str, Tensor]:
        """Returns name of a dense tensor (Hugging Face) -> the memory, of the required shape, that it is written to."""
        return {name: target for leaf in self.leaves() for name, target in leaf.load_targets()}

    def stored_parts(self) -> dict[str, StoredPart]:
        """Returns the parts of load targets that differ from stored tensors: rows in another order, a rank's share."""
        return {
            name: part for leaf in self.leaves() if isinstance(leaf, SplitLayer) for name, part in leaf.stored_parts()
        }

    def vectors(self) -> dict[str, Tensor]:
        """Returns the load targets that are not weights of modules: norms and biases."""
        weights = {f"{shard.name}.weight" for module in self.modules() for shard in module.shards}
        return {name: target for name, target in self.load_targets().items() if name not in weights}

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of loaded tensors; quantized weights count as packed."""
        vectors = sum(vector.nbytes for vector in self.vectors().values())
        return vectors + sum(part.nbytes for module in self.modules() for part in module.parts)
