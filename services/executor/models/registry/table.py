"""Generates docs/models.md from the registry and from models made of it (`make docs`).

The file given has load times and peak memory as `benchmarks.load_models` measured them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from pagewire.services.executor.layers.kv_spec import CacheSpec, LatentSpec, StateSpec
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.models.registry import ARCHITECTURES, THROUGH_TRANSFORMERS

# Sizes of the models that the table is made from: about 150 million weights in every family.
EXAMPLE_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}

_PAGE = """\
# Models

This page is generated from the registry by `make docs`.

"Architecture" is the class that `config.json` names. What it says of an architecture holds on the CPU and, with kernels
that are compiled ahead of time and run in Triton's interpreter but on [no GPU yet](gpu.md), on CUDA.

## Pagewire's own code

- **Formats**: *quantized* stands for every format of [quantization.md](quantization.md).
- **KV cache**: what layers keep of a request: keys and values of *all tokens* or of those that a *window* still sees,
  *latent vectors* (one of each token for all heads), or a *state* of constant size. Encoders keep nothing.
- **Ranks**: whether several can share its layers (`--tensor-parallel-size`).
- **Recorded**: decode steps are replayed, as CUDA graphs or recorded steps on a CPU.
- **Load**: seconds per GB of 16-bit weights with files in the page cache, and the highest memory of the loading process
  relative to the weights, in a checkpoint of random weights ([how](../benchmarks/README.md)).
- **Tested against**: what its logits or vectors are compared with.

{own}

## Through transformers

Any other decoder-only architecture that transformers implements with ordinary attention runs in transformers' code,
over Pagewire's paged attention: from safetensors in 16 or 32 bits or from GGUF files, which are dequantized. The prefix
cache works, weights cannot be quantized, and there are no CUDA graphs. On a CPU, steps are recorded unless their code
looks at values; the log says so where it does. Tests compare the logits of these with transformers' own:

{foreign}
"""

_HEADINGS = ("architecture", "formats", "KV cache", "prefix cache", "ranks", "recorded", "tested against", "load")


def example_config(architecture: Architecture[Any]) -> dict[str, Any]:
    """Returns the keys of a `config.json`: transformers' defaults of the family, in a size that fits any machine."""
    keys: dict[str, Any] = AutoConfig.for_model(
        architecture.model_type, **{**EXAMPLE_SIZES, **architecture.example}
    ).to_dict()
    return keys | {"architectures": [architecture.name]}


def example_model(architecture: Architecture[Any]) -> OwnModel:
    """Builds a model without memory for weights."""
    config = architecture.read_config(example_config(architecture), torch.bfloat16)
    return architecture.model(config, config.max_position_embeddings, Placement(config.dtype, torch.device("meta")))


def page(loading: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the page of models. loading: by architecture, `seconds_per_gb` and `peak` (memory relative to the
    weights)."""
    rows = [_row(architecture, loading.get(name)) for name, architecture in sorted(ARCHITECTURES.items())]
    return _PAGE.format(
        own="\n".join(_table([_HEADINGS, ("---",) * len(_HEADINGS), *rows])),
        foreign="\n".join(f"- `{name}`" for name in THROUGH_TRANSFORMERS),
    )


def _row(architecture: Architecture[Any], loaded: Mapping[str, float] | None) -> tuple[str, ...]:
    model = example_model(architecture)
    formats = ["safetensors"] + ["GGUF"] * (architecture.gguf is not None) + ["quantized"] * bool(model.modules())
    kinds = sorted({_kind(layer.kv_spec()) for layer in model.caching_layers})
    return (
        f"`{architecture.name}`",
        ", ".join(formats),
        ", ".join(kinds) or "none",
        "yes" if kinds else "no",
        "yes" if model.unsplit is None else "no",
        "yes" if model.capturable else "no",
        architecture.reference,
        "" if loaded is None else f"{loaded['seconds_per_gb']:.1f} s/GB, {loaded['peak']:.2f}x",
    )


def _kind(spec: CacheSpec) -> str:
    if isinstance(spec, StateSpec):
        return "state"
    if isinstance(spec, LatentSpec):
        return "latent vectors"
    return "window" if spec.window else "all tokens"


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    return (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(page(json.loads(Path(sys.argv[1]).read_text())))
