"""Host memory as the system counts it."""

from __future__ import annotations

import mmap
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from pagewire.config import ExecutorConfig
from pagewire.services.executor import stats
from pagewire.services.executor.device.memory import resident_bytes
from pagewire.services.executor.start.startup import start_runner
from tests.services.executor.helpers.stepping import BLOCK_SIZE, Driver, prompt, write_tiny_llama

MIB = 1 << 20
HUGE_PAGE = 2 * MIB  # what touching a byte may take


def test_memory_that_was_never_touched_is_not_resident():
    # From the system itself: the C library may hand out what was touched before.
    tensors = [torch.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=torch.uint8) for _ in range(2)]
    assert resident_bytes(tensors) < 2 * HUGE_PAGE
    tensors[0][16 * MIB : 32 * MIB] = 1
    assert 16 * MIB <= resident_bytes(tensors) <= 16 * MIB + 4 * HUGE_PAGE
    assert resident_bytes(tensors[:1]) >= 16 * MIB
    assert resident_bytes([tensors[0][40 * MIB : 60 * MIB]]) == 0


def test_the_cache_takes_memory_as_its_blocks_are_used(tmp_path: Path):
    model = str(write_tiny_llama(tmp_path / "m"))
    # A separate process, like an executor: its C library has no memory that was touched before.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        before, after, total = fresh.submit(resident_before_and_after, model).result()
    assert before < total / 10
    assert before < after < total


def resident_before_and_after(model: str) -> tuple[float, float, int]:
    """Prints the resident bytes of the cache before and after a request, and its size."""
    config = ExecutorConfig(
        model="tiny",
        device="cpu",
        dtype="float32",
        load_format="dummy",
        num_threads=1,
        max_num_seqs=4,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=256 * MIB,
    )
    runner, info = start_runner(config, model, lambda fraction, text: None)
    before = resident_gauge()
    driver = Driver(runner, info.num_blocks)
    driver.add(0, prompt(80))
    driver.generate(0, 3, first=80)
    return before, resident_gauge(), info.kv_cache_bytes


def resident_gauge() -> float:
    (family,) = stats.KV_CACHE_RESIDENT_BYTES.collect()
    return family.samples[0].value
