"""Writes the default model as safetensors, for machines without `gguf`.

`python -m benchmarks.gpu.engine.real_checkpoint DIRECTORY`

In shards of 40 MB (the embedding is 57), so that they can be carried one by one. Needs `pagewire[executor]` here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file, or a name (default: %(default)s)")
    arguments = parser.parse_args()
    dense(resolve_model(arguments.model)).save_pretrained(arguments.directory, max_shard_size="40MB")
    print(f"{arguments.directory}: {sum(path.stat().st_size for path in arguments.directory.iterdir()) / 1e6:.0f} MB")
    return 0


def dense(file: Path) -> PreTrainedModel:
    """Returns the model of a GGUF file with weights in bf16."""
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    # transformers writes nothing that it calls quantized, dense as it has become; older versions read no null.
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    config = AutoConfig.for_model(**settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    return model


if __name__ == "__main__":
    sys.exit(main())
