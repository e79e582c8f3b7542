"""The memory of large requests is returned to the system."""

import asyncio
import itertools

import pytest

from pagewire.process import memory_return
from pagewire.process.memory_return import LARGE, return_memory_after


@pytest.fixture
def num_returns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time, with bounds that tests can wait for."""
    returns: list[int] = []
    count = itertools.count()
    monkeypatch.setattr(memory_return, "release_unused_memory", lambda: returns.append(next(count)))
    monkeypatch.setattr(memory_return, "_QUIET_S", 0.05)
    monkeypatch.setattr(memory_return, "_AT_LATEST_S", 0.1)
    return returns


async def test_once_when_large_ones_are_over(num_returns: list[int]) -> None:
    for _ in range(10):
        return_memory_after(LARGE)
    async with asyncio.timeout(10):
        while not num_returns:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert num_returns == [0]


async def test_also_while_they_go_on(num_returns: list[int]) -> None:
    async with asyncio.timeout(10):
        while len(num_returns) < 2:
            return_memory_after(LARGE)
            await asyncio.sleep(0.001)


async def test_not_after_small_ones(num_returns: list[int]) -> None:
    return_memory_after(LARGE - 1)
    await asyncio.sleep(0.2)
    assert not num_returns
