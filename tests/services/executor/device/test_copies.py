"""Copies between host and device: host memory that is there before it is needed, and what rides along with results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.device import results, upload
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.start import host_memory

CPU, META = torch.device("cpu"), torch.device("meta")  # of a device without memory, only sizes matter


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of what is allocated within."""
    empty, sizes = torch.empty, list[int]()

    def allocate(size: Any, dtype: torch.dtype, *, pin_memory: bool = False) -> torch.Tensor:
        sizes.append(size)
        return empty(size, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload.torch, "empty", allocate)
        yield sizes


@given(st.lists(st.integers(0, host_memory.LARGEST_BYTES // 4 // 8), min_size=1, max_size=4))
def test_copies_while_serving_ask_for_no_new_sizes(lengths: list[int]) -> None:
    target = torch.empty(lengths[0], dtype=torch.int32, device=META)
    with counted() as reserved:
        host_memory.reserve(META)
    with counted() as asked:
        on_device = upload.upload(META, {str(index): np.zeros(length) for index, length in enumerate(lengths)})
        upload.upload_into(target, np.zeros(lengths[0], np.int32))
        upload.host_memory((lengths[-1], 2), torch.float32, META)  # of results
    assert [len(tensor) for tensor in on_device.values()] == lengths
    assert len(asked) == 3 and set(asked) <= set(reserved)


def test_each_size_is_reserved_as_often_as_it_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = dict[int, int](), dict[int, int]()

    class Memory:
        def __init__(self, shape: tuple[int], *_: object) -> None:
            (self.size,) = shape
            alive[self.size] = alive.get(self.size, 0) + 1
            most[self.size] = max(most.get(self.size, 0), alive[self.size])

        def __del__(self) -> None:
            alive[self.size] -= 1

    monkeypatch.setattr(host_memory, "host_memory", Memory)
    host_memory.reserve(META)
    assert set(most.values()) == {host_memory.NUM_RESERVED} and min(most) == upload.SMALLEST_BYTES
    assert max(most) == host_memory.LARGEST_BYTES and not any(alive.values())


@pytest.mark.parametrize("left", [0, 3])
def test_counters_that_are_left_end_the_executor(left: int) -> None:
    looked = []

    def num_left() -> torch.Tensor:
        looked.append(left)
        return torch.tensor(left)

    copies = results.ResultCopies(CPU, num_left)
    tensors = {"token_ids": torch.tensor([7])}
    fetched = [copies.fetch(tensors) for _ in range(results.CHECKED_EVERY)]
    assert len(looked) == 1, "it is looked at now and then, not with each step"
    assert [pending.wait()["token_ids"].tolist() for pending in fetched[:-1]] == [[7]] * (results.CHECKED_EVERY - 1)
    if left:
        with pytest.raises(DeviceError, match=r"left 3 counters .* would be wrong"):
            fetched[-1].wait()
    else:
        assert fetched[-1].wait()["token_ids"].tolist() == [7]
