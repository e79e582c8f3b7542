import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagewire.files.tokenizer_files.loading import load_tokenizer
from tests.e2e.line import Line, running_line
from tests.services.executor.models.tiny import save_tiny

# transformers' tokenizer and model.
Reference = tuple[Any, Any]

# fp32: greedy tokens do not depend on rounding.
EXECUTOR_FLAGS = ["--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", "1GiB"]
# On a machine that is busy with other things, 200 requests may wait for longer than the default allows.
SCHEDULER_FLAGS = ["--max-queue-time", "0"]


def short_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory with a name that is short enough for sockets (at most 107 bytes on Linux)."""
    return tempfile.TemporaryDirectory(prefix="pw-", ignore_cleanup_errors=True)


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    """A directory for the sockets of services that a module starts by itself."""
    with short_directory() as name:
        yield Path(name)


@pytest.fixture(scope="session")
def default_line(smollm2_gguf: Path) -> Iterator[Line]:
    """The line of the default model, shared by all tests: each leaves it ready, with the flags that it found."""
    flags = {"executor": EXECUTOR_FLAGS, "scheduler": SCHEDULER_FLAGS}
    with short_directory() as name, running_line(Path(name), str(smollm2_gguf), **flags) as line:
        yield line


@pytest.fixture(scope="session")
def quick_line(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Line]:
    """The line of a model that costs next to nothing, of 512 tokens, for behavior that does not depend on the model."""
    model = tmp_path_factory.mktemp("quick") / "model"
    save_tiny(model, "Llama", vocab_size=49152, max_position_embeddings=512, num_hidden_layers=2)
    load_tokenizer(smollm2_gguf).backend.save(str(model / "tokenizer.json"))  # what the executor reads for grammars
    flags = {
        "executor": ["--dtype", "float32", "--num-gpu-blocks-override", "400"],
        "scheduler": SCHEDULER_FLAGS,
        "tokenizer": ["--tokenizer", str(smollm2_gguf)],
    }
    with short_directory() as name, running_line(Path(name), str(model), **flags) as line:
        yield line


@pytest.fixture(scope="session")
def line(default_line: Line) -> Line:
    """The line of the default model; modules that do not depend on the model take `any_line` instead."""
    return default_line


@pytest.fixture(scope="session", params=["quick_line", pytest.param("default_line", marks=pytest.mark.slow)])
def any_line(request: pytest.FixtureRequest) -> Line:
    """The quick line and, in the full sweep, the default model's line too."""
    line: Line = request.getfixturevalue(request.param)
    return line


@pytest.fixture(scope="session")
def reference(reference_checkpoint: Path) -> Reference:
    """The default model in transformers, in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(reference_checkpoint)
    return tokenizer, AutoModelForCausalLM.from_pretrained(reference_checkpoint, dtype=torch.float32).eval()
