"""Rows between processes, through shared memory and through gloo; and sums through memory of all."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.peer_memory import PEER_BYTES, most_summed
from pagewire.services.executor import stats
from pagewire.services.executor.parallel import peer_sums
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from tests.sweep import examples

SIZE = 3
Ask = Callable[[list[Any]], list[bool]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Has all ranks do the same; whether each was right."""
    store, memory = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False), SharedMemory([SIZE])
    peers = os.memfd_create("peers")
    os.ftruncate(peers, SIZE * PEER_BYTES)
    command = [sys.executable, "-m", "tests.services.executor.parallel.rank_process"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(memory.descriptor), str(peers), str(store.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[memory.descriptor, peers],
            text=True,
        )
        for rank in range(SIZE)
    ]

    def ask(question: list[Any]) -> list[bool]:
        for rank in ranks:
            assert rank.stdin is not None
            print(json.dumps(question), file=rank.stdin, flush=True)
        return [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]

    yield ask
    memory.end()
    for rank in ranks:
        rank.kill()
        rank.communicate()
    os.close(peers)


@settings(max_examples=examples(40), deadline=None)
@given(
    communicator=st.sampled_from(["shared memory", "gloo"]),
    counts=st.lists(st.one_of(st.just(0), st.integers(0, 30)), min_size=SIZE**2, max_size=SIZE**2),
    width=st.sampled_from([1, 64, 20_000]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_rows_go_where_they_belong(ask: Ask, communicator: str, counts: list[int], width: int, dtype: str) -> None:
    """No rows at all, too, and more than fit into memory at once."""
    assert ask([communicator, counts, width, dtype]) == [True] * SIZE


@settings(max_examples=examples(10), deadline=None)
@given(
    # Of a part, of several parts, and more than are summed so.
    counts=st.lists(st.one_of(st.integers(0, 9000), st.integers(250_000, 300_000)), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_small_and_large_tensors_are_summed(ask: Ask, counts: list[int], dtype: str) -> None:
    assert ask(["peers", counts, 0, dtype]) == [True] * SIZE


def test_memory_is_shared_where_all_gpus_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: {own, other} != {1, 3})
    assert peer_sums._refused(2, [0, 1]) is None
    assert peer_sums._refused(4, [1, 2, 3, 0]) == "GPU 1 cannot read the memory of all others"
    assert "not on one machine" in str(peer_sums._refused(2, []))
    assert "not on one machine" in str(peer_sums._refused(2, [0, 0]))
    assert "more than 8" in str(peer_sums._refused(9, list(range(9))))
    assert most_summed(2) > most_summed(8) > most_summed(9) == 0


@pytest.mark.parametrize(("on_one_machine", "reason"), [(False, "not on one machine"), (True, "device type cpu")])
def test_without_shared_memory_sums_go_through_the_library(
    on_one_machine: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Logs the reason, once, and counts."""
    group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10)))
    before = stats.LIBRARY_SUMS._value.get()
    with caplog.at_level(logging.WARNING):
        assert peer_sums.share_memory(group, torch.device("cpu"), on_one_machine) is None
    assert stats.LIBRARY_SUMS._value.get() == before + 1
    assert len(caplog.messages) == 1 and reason in caplog.text
