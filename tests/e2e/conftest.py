import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pagewire.files.tokenizer_files.loading import load_tokenizer
from tests.e2e.line import Line, running_line
from tests.services.executor.models.tiny import save_tiny

# transformers' tokenizer and model.
Reference = tuple[Any, Any]

# fp32: greedy tokens do not depend on rounding. Short steps, as an executor records each size of step while it is idle.
EXECUTOR_FLAGS = [
    "--dtype",
    "float32",
    "--max-model-len",
    "4096",
    "--kv-cache-memory-bytes",
    "1GiB",
    "--max-num-batched-tokens",
    "256",
]
QUICK_EXECUTOR_FLAGS = ["--dtype", "float32", "--num-gpu-blocks-override", "400"]
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
def quick_model(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Path:
    """A model that costs next to nothing, of 512 tokens, with the default model's tokenizer."""
    model = tmp_path_factory.mktemp("quick") / "model"
    save_tiny(model, "Llama", vocab_size=49152, max_position_embeddings=512, num_hidden_layers=2)
    load_tokenizer(smollm2_gguf).backend.save(str(model / "tokenizer.json"))  # what the executor reads for grammars
    return model


@pytest.fixture(scope="session")
def quick_line(quick_model: Path, smollm2_gguf: Path) -> Iterator[Line]:
    """The line of the quick model, for behavior that does not depend on the model."""
    flags = {
        "executor": QUICK_EXECUTOR_FLAGS,
        "scheduler": SCHEDULER_FLAGS,
        "tokenizer": ["--tokenizer", str(smollm2_gguf)],
    }
    with short_directory() as name, running_line(Path(name), str(quick_model), **flags) as line:
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


@pytest.fixture(scope="module")
def slow_line(any_line: Line) -> Iterator[Line]:
    """`any_line` with steps that take long enough for a service to be killed meanwhile."""
    with any_line.slow_steps():
        yield any_line


@pytest.fixture(scope="session")
def reference(any_line: Line, request: pytest.FixtureRequest) -> Reference:
    """The model of `any_line` in transformers, in fp32."""
    if is_default(any_line):
        path: Path = request.getfixturevalue("reference_checkpoint")
        tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        path = Path(any_line.model)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    return tokenizer, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def is_default(line: Line) -> bool:
    """Returns whether a line is that of the default model."""
    return line.model.endswith(".gguf")
