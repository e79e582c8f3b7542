"""The start of ranks."""

import json
from pathlib import Path

import pytest

from pagewire.config import ExecutorConfig
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.parallel.communicator import Communicator
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.start.phases import Phases
from pagewire.services.executor.start.runner_setup import Setup, cuda_cache_bytes
from pagewire.services.executor.step.limits import Limits
from tests.services.executor.helpers.fake_meter import FakeMeter
from tests.services.executor.helpers.stepping import CPU, write_tiny_llama
from tests.services.executor.parallel.threads import on_ranks


def test_memory_is_measured_by_all_ranks_or_by_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps its own profile. One that has lost it cannot measure without the others."""
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path))
    path, config = write_tiny_llama(tmp_path / "model"), ExecutorConfig(max_num_seqs=4)
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96, block_size=16)

    def is_cached(ranks: Communicator) -> bool:
        model = load_model(path, dtype="float32", device=CPU, load_format="dummy", tensor=ranks)
        group = Group(ranks.rank, ranks.size, world=ranks, tensor=ranks)
        setup, phases = Setup(config, model, limits, (), CPU, group=group), Phases()
        cuda_cache_bytes(setup, path, FakeMeter(lambda: 0), phases, lambda fraction, text: None)
        return "cached" in str(phases)

    assert on_ranks(2, is_cached) == [False, False]
    assert on_ranks(2, is_cached) == [True, True]
    (of_rank_1,) = (
        file for file in tmp_path.glob("profiles/*.json") if json.loads(file.read_text())["key"]["rank"][0] == 1
    )
    of_rank_1.unlink()
    assert on_ranks(2, is_cached) == [False, False]
    assert on_ranks(2, is_cached) == [True, True]
