import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.line import Line, running_line
from tests.services.executor.models.tiny import save_tiny

# transformers' tokenizer and model.
Reference = tuple[Any, Any]

# fp32: greedy tokens do not depend on rounding.
EXECUTOR_FLAGS = ["--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", "1GiB"]
# On a machine that is busy with other things, 200 requests may wait for longer than the default allows.
SCHEDULER_FLAGS = ["--max-queue-time", "0"]


def short_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory whose name leaves room for a socket's (at most 107 bytes on Linux)."""
    return tempfile.TemporaryDirectory(prefix="pw-", ignore_cleanup_errors=True)


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """For the sockets of services that a module starts by itself, apart from those of `line`."""
    with short_directory() as name:
        yield Path(name)


@pytest.fixture(scope="session")
def line(smollm2_gguf: Path) -> Iterator[Line]:
    """The default model, shared by all tests: each leaves it ready, with the flags it found."""
    flags = {"executor": EXECUTOR_FLAGS, "scheduler": SCHEDULER_FLAGS}
    with short_directory() as name, running_line(Path(name), str(smollm2_gguf), **flags) as line:
        yield line


@pytest.fixture(scope="session")
def quick_line(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Line]:
    """A model that costs next to nothing, of 512 tokens: for what depends on the services, not on what they say."""
    model = tmp_path_factory.mktemp("quick") / "model"
    save_tiny(model, "Llama", vocab_size=49152, max_position_embeddings=512, num_hidden_layers=2)
    flags = {
        "executor": ["--dtype", "float32", "--num-gpu-blocks-override", "400"],
        "scheduler": SCHEDULER_FLAGS,
        "tokenizer": ["--tokenizer", str(smollm2_gguf)],
    }
    with short_directory() as name, running_line(Path(name), str(model), **flags) as line:
        yield line


@pytest.fixture(scope="session")
def reference(smollm2_gguf: Path) -> Reference:
    """The default model in transformers, in fp32."""
    where = {"pretrained_model_name_or_path": smollm2_gguf.parent, "gguf_file": smollm2_gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    return tokenizer, AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
