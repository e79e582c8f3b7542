"""Host memory as the system counts it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pagewire.config import ExecutorConfig
from services.executor import stats
from services.executor.memory import resident_bytes
from services.executor.startup import start_runner
from tests.services.executor.stepping import BLOCK_SIZE, Driver, prompt, write_tiny_llama

MIB = 1 << 20
HUGE_PAGE = 2 * MIB  # what touching a byte may take


def test_memory_that_was_never_touched_is_not_resident():
    tensors = [torch.from_numpy(np.zeros(64 * MIB, dtype=np.uint8)) for _ in range(2)]
    assert resident_bytes(tensors) < 2 * HUGE_PAGE
    tensors[0][16 * MIB : 32 * MIB] = 1
    assert 16 * MIB <= resident_bytes(tensors) <= 16 * MIB + 4 * HUGE_PAGE
    assert resident_bytes(tensors[:1]) >= 16 * MIB
    assert resident_bytes([tensors[0][40 * MIB : 60 * MIB]]) == 0


def test_the_cache_takes_memory_as_its_blocks_are_used(tmp_path: Path):
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
    runner, info = start_runner(config, str(write_tiny_llama(tmp_path / "m")), lambda fraction, text: None)
    before = resident_gauge()
    assert before < info.kv_cache_bytes / 10
    driver = Driver(runner, info.num_blocks)
    driver.add(0, prompt(80))
    driver.generate(0, 3, first=80)
    assert before < resident_gauge() < info.kv_cache_bytes


def resident_gauge() -> float:
    (family,) = stats.KV_CACHE_RESIDENT_BYTES.collect()
    return family.samples[0].value
