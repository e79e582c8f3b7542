"""Measures the time and memory of loading models: `python -m benchmarks.load_models [ARCHITECTURE OR PATH ...]`.

For each architecture of the registry (or those that are named), writes a checkpoint of the size in `EXAMPLE_SIZES` with
equal weights and loads it twice in a process of its own; the second time its file is in the page cache. A path is
loaded as it is. Prints a line per model and writes the figures to `docs/models.json`, from which docs/models.md is
generated:

- seconds per GB: from the open file to weights in the layout of the CPU's kernels.
- peak: the most anonymous memory of the process while it loaded, above its memory before, relative to the weights.
  Mapped files do not count: the system takes their pages back.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.registry import ARCHITECTURES
from pagewire.services.executor.models.registry.table import example_config, example_model

_FIGURES = Path(__file__).parents[1] / "docs" / "models.json"
_CHILD = "--load"
_INTERVAL_S = 0.005


def main(names: list[str]) -> None:
    figures = json.loads(_FIGURES.read_text())
    for name in names or sorted(ARCHITECTURES):
        with tempfile.TemporaryDirectory() as directory:
            try:
                path = write_checkpoint(name, Path(directory)) if name in ARCHITECTURES else Path(name)
                measured = [loaded_in_a_process(path) for _ in range(2)][-1]
            except subprocess.CalledProcessError as error:
                print(f"{name}: not measured: {error.stderr.strip().splitlines()[-1]}", flush=True)
                continue
        print(
            f"{name}: {measured['gigabytes']:.2f} GB in {measured['seconds']:.2f} s, "
            f"{measured['seconds_per_gb']:.2f} s/GB, peak {measured['peak']:.2f} x",
            flush=True,
        )
        if name in ARCHITECTURES:
            figures[name] = {key: round(measured[key], 3) for key in ("seconds_per_gb", "peak")}
    _FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def write_checkpoint(name: str, directory: Path) -> Path:
    """Writes a checkpoint in bf16 with equal numbers; loading does not depend on them."""
    architecture = ARCHITECTURES[name]
    (directory / "config.json").write_text(json.dumps(example_config(architecture), default=str))
    shapes = {tensor: target.shape for tensor, target in example_model(architecture).load_targets().items()}
    tensors = {tensor: torch.full(shape, 0.01, dtype=torch.bfloat16) for tensor, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def loaded_in_a_process(path: Path) -> dict[str, float]:
    """Raises CalledProcessError."""
    command = [sys.executable, "-m", "benchmarks.load_models", _CHILD, str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return measured


def load(path: Path) -> dict[str, Any]:
    torch.ones(1).sum()  # what torch itself starts with is not loading
    before = anonymous_bytes()
    peak, ended = [before], threading.Event()

    def watch() -> None:
        while not ended.wait(_INTERVAL_S):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    model = load_model(path, device=torch.device("cpu"))
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    return {
        "gigabytes": model.weight_bytes / 1e9,
        "seconds": seconds,
        "seconds_per_gb": seconds / (model.weight_bytes / 1e9),
        "peak": (max(peak[0], anonymous_bytes()) - before) / model.weight_bytes,
    }


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        print(json.dumps(load(Path(sys.argv[2]))))
    else:
        main(sys.argv[1:])
