"""Image tensors to embeddings: transformers' vision tower and projector, with weights loaded like all others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from pagewire.services.executor.config.model_config import ModelLoadError


class VisionTower:
    """The part of a transformers model in front of its language model. Always dense."""

    def __init__(
        self, config: Mapping[str, Any], names: Mapping[str, str], dtype: torch.dtype, device: torch.device
    ) -> None:
        """config: the whole model's config.json. names: a submodule of transformers' model -> its checkpoint's name.

        Its weights are uninitialised. Raises ModelLoadError for a config that transformers does not take.
        """
        # Imported here: transformers takes seconds to import, and models without images do not need it.
        from transformers import AutoConfig, AutoModel, PreTrainedModel
        from transformers.initialization import no_init_weights

        default = torch.get_default_dtype()
        try:
            whole = AutoConfig.for_model(**deepcopy(dict(config)))  # it modifies its keywords
            text = whole.get_text_config()
            text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None  # replaced by our decoder
            text.layer_types = []
            torch.set_default_dtype(dtype)
            with torch.device(device), no_init_weights():
                model: PreTrainedModel = AutoModel.from_config(whole)
        except Exception as error:  # its classes may raise anything
            raise ModelLoadError(f"transformers makes no vision tower of this config: {error}") from error
        finally:
            torch.set_default_dtype(default)
        self._model = model.eval().requires_grad_(False)
        self._names = names
        self._device = device

    def __call__(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One image's tensors, by the names of its processor's outputs -> [num_tokens, hidden_size]"""
        features: Any = self._model.get_image_features(**tensors, return_dict=True)
        return torch.cat(list(features.pooler_output))

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        for module_name, checkpoint_name in self._names.items():
            module: nn.Module = self._model.get_submodule(module_name)
            persistent = {name for name, _ in module.named_parameters()}
            for name, tensor in module.state_dict(keep_vars=True).items():
                if name in persistent:
                    yield f"{checkpoint_name}.{name}", tensor.data
