"""The architectures of our own code. A new model is a file next to this one and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewire.services.executor.models import mamba2
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.dense import (
    cohere,
    falcon,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mimo,
    ministral,
    olmo2,
    phi,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
    starcoder2,
)
from pagewire.services.executor.models.encoders import bert, modernbert, roberta
from pagewire.services.executor.models.experts import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from pagewire.services.executor.models.vision import idefics3, llava, qwen2_5_vl

_FAMILIES: tuple[tuple[Architecture[Any], ...], ...] = (
    bert.ARCHITECTURES,
    cohere.ARCHITECTURES,
    deepseek_v2.ARCHITECTURES,
    deepseek_v3.ARCHITECTURES,
    falcon.ARCHITECTURES,
    gemma2.ARCHITECTURES,
    gemma3.ARCHITECTURES,
    glm4.ARCHITECTURES,
    glm4_moe.ARCHITECTURES,
    gpt2.ARCHITECTURES,
    gpt_neox.ARCHITECTURES,
    gpt_oss.ARCHITECTURES,
    granite.ARCHITECTURES,
    idefics3.ARCHITECTURES,
    llama.ARCHITECTURES,
    llava.ARCHITECTURES,
    mamba2.ARCHITECTURES,
    mimo.ARCHITECTURES,
    ministral.ARCHITECTURES,
    mixtral.ARCHITECTURES,
    modernbert.ARCHITECTURES,
    olmo2.ARCHITECTURES,
    olmoe.ARCHITECTURES,
    phi.ARCHITECTURES,
    phi3.ARCHITECTURES,
    qwen2.ARCHITECTURES,
    qwen2_5_vl.ARCHITECTURES,
    qwen2_moe.ARCHITECTURES,
    qwen3.ARCHITECTURES,
    qwen3_moe.ARCHITECTURES,
    roberta.ARCHITECTURES,
    seed_oss.ARCHITECTURES,
    smollm3.ARCHITECTURES,
    starcoder2.ARCHITECTURES,
)

ARCHITECTURES: dict[str, Architecture[Any]] = {
    architecture.name: architecture for family in _FAMILIES for architecture in family
}

# Architectures without our own code that tests compare with transformers' forward pass.
THROUGH_TRANSFORMERS = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "GPTBigCodeForCausalLM",
    "HeliumForCausalLM",
    "NemotronForCausalLM",
    "PersimmonForCausalLM",
    "PhimoeForCausalLM",
    "StableLmForCausalLM",
)


def gguf_form(name: str, stated: Mapping[str, Any]) -> GgufForm:
    """Returns the form in GGUF files; for an architecture without our own code, the most common form."""
    known = of_gguf(name, stated)
    return GgufForm(name) if known is None or known.gguf is None else known.gguf


def of_gguf(name: str, stated: Mapping[str, Any]) -> Architecture[Any] | None:
    """Returns the architecture by the name in a GGUF file and the file's other statements (`GgufForm.when`)."""
    forms = ((found, found.gguf) for found in ARCHITECTURES.values() if found.gguf is not None)
    return next((found for found, form in forms if form.name == name and form.when(stated)), None)
