"""MTP: a layer behind a model's last one that drafts the token after the next (DeepSeek-V3, arXiv 2412.19437, 2.2).

At each position it reads the embedding of the next token and the model's output, each normalised, projects both to one
vector, and continues like a layer of the model. Embedding and output projection are the model's. Behind the last token
that the model has computed, the layer's own output of the previous position replaces the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.drafting.draft_head import DraftHead, OwnOutputs
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext


@dataclass(frozen=True)
class MtpForm:
    """The names in a family's checkpoints for the parts of such a layer that an ordinary layer does not have."""

    layer: str  # {} is the number of ordinary layers
    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str
    hidden_first: bool = False  # of the two halves that are projected
    passes_normed: bool = False  # the next position reads the head's input, otherwise the stream before the last norm


_DEEPSEEK = MtpForm("model.layers.{}", "enorm", "hnorm", "eh_proj", "shared_head.norm")

# By the class that `config.json` names. If there are several such layers, the first is used.
FORMS = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "MiMoForCausalLM": MtpForm(
        "model.mtp_layers.0",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        hidden_first=True,
        passes_normed=True,
    ),
}


class MtpHead(DraftHead):
    """A draft model that is a part of the target's checkpoint."""

    def __init__(self, form: MtpForm, target: DecoderModel, placement: Placement, *, is_dense: bool) -> None:
        """placement: of the whole model. is_dense: whether the projection is dense, regardless of other layers."""
        config = target.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self._target, self._form = target, form
        self.embed = target.embed
        self.name = form.layer.format(config.num_layers)  # of the layer, in the checkpoint
        within = placement.within(self.name)
        self.embedding_norm = RMSNorm(form.embedding_norm, size, eps, within)
        self.hidden_norm = RMSNorm(form.hidden_norm, size, eps, within)
        projected = replace(within, quantization=None) if is_dense else within
        self.projection = Linear(2 * size, {form.projection: size}, projected, bias=False)
        # It equals the last layer in everything that differs between layers.
        self.layer = target.layer(config, config.num_layers - 1, target.rotary, within)
        self.norm = RMSNorm(form.output_norm, size, eps, within)
        self.features = OwnOutputs(size, config.dtype)

    def leaves(self) -> Iterator[Leaf]:
        yield from (self.features, self.embedding_norm, self.hidden_norm, self.projection)
        yield from self.layer.leaves()
        yield self.norm

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        embedded, features = self.embed(input_ids), self.features.read(context)
        normed = [
            self.embedding_norm.add(embedded, torch.zeros_like(embedded)),
            self.hidden_norm.add(features, torch.zeros_like(features)),
        ]
        hidden = self.projection(torch.cat(normed[::-1] if self._form.hidden_first else normed, dim=1))
        residual = torch.zeros_like(hidden)
        output = self.norm.add(self.layer(hidden, residual, context), residual)
        return torch.cat((output, output if self._form.passes_normed else residual), dim=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._target.compute_logits(hidden[:, : self.config.hidden_size].contiguous())

    def ignored(self, name: str) -> bool:
        """The model's own tensors, and copies of its embedding and output projection."""
        own = name.removeprefix(f"{self.name}.")
        return own == name or own.startswith(("embed_tokens.", "shared_head.head."))
