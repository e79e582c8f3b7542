"""Weights through staging buffers, with a device that copies as late as it may."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.gguf import GgufSource
from pagewire.services.executor.loading.weights.gguf_file import GgufFile
from pagewire.services.executor.loading.weights.jobs import run_jobs
from pagewire.services.executor.loading.weights.read import read_jobs
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.loading.weights.staging import Staging
from tests.services.executor.loading.weights.test_gguf import tiny_model, write_gguf

NUM_THREADS, NUM_BUFFERS, BUFFER_BYTES = 2, 3, 1000


class LateTransfer:
    """Copies when a caller waits for it, and no earlier: a buffer that is filled too early shows in the weights."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, Tensor] | None = None
        self.staged: list[tuple[torch.dtype, int]] = []

    def start(self, staged: Tensor, target: Tensor) -> None:
        assert self._pending is None, "the buffer was not free"
        self._pending = staged, target
        self.staged.append((staged.dtype, staged.nbytes))

    def wait(self) -> None:
        if self._pending is not None:
            staged, target = self._pending
            target.copy_(staged)
            self._pending = None


def load(weights: WeightSource, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[tuple[torch.dtype, int]]]:
    """The weights that arrived, and dtype and bytes of each copy."""
    targets = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in weights.shapes.items()}
    transfers = [LateTransfer() for _ in range(NUM_BUFFERS)]
    staging = Staging((torch.empty(BUFFER_BYTES, dtype=torch.uint8), transfer) for transfer in transfers)
    run_jobs(read_jobs(weights, targets, staging), NUM_THREADS, lambda fraction, text: None)
    staging.finish()
    return targets, [copy for transfer in transfers for copy in transfer.staged]


@pytest.mark.parametrize(
    ("stored", "wanted", "staged"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),  # narrowed on the host
        (torch.float16, torch.float32, torch.float16),  # widened on the device
        (torch.float16, torch.bfloat16, torch.float16),
    ],
)
def test_safetensors_arrive_whole_through_small_buffers(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, staged: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"b": (97, 31), "a": (700,), "c": (5, 3, 11), "wide": (3, 250)}
    save_file(
        {name: torch.randn(shape, generator=generator).to(stored) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    weights = SafetensorsSource(tmp_path)
    arrived, copies = load(weights, wanted)
    for name, target in arrived.items():
        expected = torch.empty_like(target)
        weights.read_into(name, expected)
        assert torch.equal(target, expected), name
    assert {dtype for dtype, _ in copies} == {staged}
    total = sum(target.numel() for target in arrived.values()) * staged.itemsize
    assert sum(num_bytes for _, num_bytes in copies) == total > 3 * NUM_BUFFERS * BUFFER_BYTES


def test_gguf_arrives_with_its_rows_in_place(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", tiny_model("Llama"), arch="llama"))
    weights = GgufSource(file)
    arrived, copies = load(weights, torch.bfloat16)
    for name, target in arrived.items():
        expected = torch.empty_like(target)
        weights.read_into(name, expected)
        assert torch.equal(target, expected), name
    assert len(copies) > len(arrived)


def test_a_damaged_tensor_ends_loading(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 4), "b": torch.zeros(4, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="has type I8"):
        load(SafetensorsSource(tmp_path), torch.bfloat16)


def test_readers_wait_for_a_buffer() -> None:
    """No more pieces are held in host memory than there are buffers, whichever thread reads."""
    staging = Staging([(torch.empty(8, dtype=torch.uint8), LateTransfer())])
    targets, reading, most = torch.zeros(6, 8, dtype=torch.uint8), 0, 0

    def fill(staged: Tensor) -> None:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        time.sleep(0.005)  # long enough for another reader to come, if nothing stops it
        staged.fill_(7)
        reading -= 1

    threads = [threading.Thread(target=staging.write, args=(target, torch.uint8, fill)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    staging.finish()
    assert most == 1 and bool((targets == 7).all())
