"""MiMo: Qwen2 with a drafting layer (`mtp.py`), which the model itself does not load."""

from __future__ import annotations

from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.dense.qwen2 import qwen2_config


class MimoModel(DecoderModel):
    def ignored(self, name: str) -> bool:
        return name.startswith("model.mtp_layers.") or super().ignored(name)


# transformers does not know it, but all keys of its config are Qwen2's.
ARCHITECTURES = (Architecture("MiMoForCausalLM", "qwen2", qwen2_config, MimoModel, reference="transformers, as Qwen2"),)
