"""Rows between processes, through shared memory and through gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.parallel.shared_memory import SharedMemory
from tests.sweep import examples

SIZE = 3
Ask = Callable[[list[Any]], list[bool]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Has all ranks do the same; whether each was right."""
    store, memory = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False), SharedMemory([SIZE])
    command = [sys.executable, "-m", "tests.services.executor.parallel.rank_process"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(memory.descriptor), str(store.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[memory.descriptor],
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
