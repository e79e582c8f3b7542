"""The built-in model as transformers reads its GGUF file, converted once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch


def converted(gguf: Path, factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint in fp32 with the tokenizer; conversion takes a dozen seconds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = factory.getbasetemp()
    # Workers of pytest-xdist have folders of their own in that of the run.
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path = run / "reference-checkpoint"
    with (run / "reference-checkpoint.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_dir():
            partial = path.with_suffix(".partial")
            AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
            model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            model.hf_quantizer = None  # the weights are fp32 now
            model.config.__dict__.pop("quantization_config", None)
            model.save_pretrained(partial)
            partial.rename(path)
    return path
