"""Collectives through shared memory, of ranks that are threads here: C++ and plain torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import reduce
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.channel import channel_bytes, channel_ended, channel_turns, channel_waited, end_channel
from pagewire.kernels.cpu.recording import Memory, record
from tests.kernels.implementations import fallback, native
from tests.kernels.routes import Routes
from tests.sweep import examples

pytestmark = pytest.mark.pairs

implementations = pytest.mark.parametrize("cpu", [native, fallback], ids=["native", "fallback"])
SLOT_ELEMENTS = 2**18  # of fp32


def make_channel(size: int) -> Tensor:
    return torch.zeros(channel_bytes(size), dtype=torch.uint8)


def on_ranks(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Returns what function(rank) returns on each of `size` threads."""
    results: list[Future[Any]] = [Future() for _ in range(size)]

    def run(rank: int) -> None:
        try:
            results[rank].set_result(function(rank))
        except BaseException as error:
            results[rank].set_exception(error)

    for rank in range(size):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    done, _ = wait(results, timeout=60, return_when=FIRST_EXCEPTION)
    for result in done:
        result.result()  # what one has raised, the others wait for
    return [result.result(timeout=60) for result in results]


def given_by(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = 10 * torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return x.to(dtype)


@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "shape"), [(2, (1, 576)), (3, (7, 41)), (2, (3, SLOT_ELEMENTS)), (1, (5, 3))])
def test_all_reduce_adds_in_the_order_of_ranks(
    cpu: ModuleType, dtype: torch.dtype, size: int, shape: tuple[int, ...]
) -> None:
    channel = make_channel(size)
    parts = [given_by(rank, shape, dtype) for rank in range(size)]
    expected = torch.zeros(shape)
    for part in parts:
        expected += part
    on_ranks(size, lambda rank: cpu.all_reduce(parts[rank], channel, rank, size))
    for part in parts:
        assert torch.equal(part, expected.to(dtype))


@implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "shape"), [(3, (5, 7)), (2, (3, SLOT_ELEMENTS + 5)), (2, (1, 1))])
def test_all_gather_puts_columns_side_by_side(
    cpu: ModuleType, dtype: torch.dtype, size: int, shape: tuple[int, int]
) -> None:
    channel = make_channel(size)
    parts = [given_by(rank, shape, dtype) for rank in range(size)]
    for out in on_ranks(size, lambda rank: cpu.all_gather(parts[rank], channel, rank, size)):
        assert torch.equal(out, torch.cat(parts, dim=1))


@implementations
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_all_to_all_takes_rows_where_they_belong(cpu: ModuleType, data: st.DataObject) -> None:
    """Any number of rows between any two ranks, in one turn or in several."""
    size = data.draw(st.integers(1, 4))
    counts = data.draw(st.lists(st.integers(0, 40), min_size=size * size, max_size=size * size))
    width = data.draw(st.sampled_from([1, 41, SLOT_ELEMENTS // 16 + 1]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int32]))
    channel, routes = make_channel(size), Routes.of(counts, size)
    parts = [routes.given_by(rank, width, dtype) for rank in range(size)]
    expected = [routes.expected(rank, [part.clone() for part in parts]) for rank in range(size)]
    on_ranks(size, lambda rank: cpu.all_to_all(parts[rank], routes.rows, routes.starts, channel, rank, size))
    assert all(map(torch.equal, parts, expected))
    assert not channel_ended(channel)


@implementations
@pytest.mark.parametrize("num_elements", [1, 300_000])
def test_broadcast_gives_the_roots_to_all(cpu: ModuleType, num_elements: int) -> None:
    """One after the other: a root that is ahead does not write over what others have not read."""
    channel, rounds = make_channel(3), 5

    def run(rank: int) -> list[Tensor]:
        received = []
        for turn in range(rounds):
            x = torch.full((num_elements,), 10 * turn + rank)
            cpu.broadcast(x, 2, channel, rank, 3)
            received.append(x)
        return received

    for received in on_ranks(3, run):
        assert all(torch.equal(x, torch.full_like(x, 10 * turn + 2)) for turn, x in enumerate(received))


@settings(max_examples=examples(15), deadline=None)
@given(
    size=st.integers(1, 5),
    calls=st.lists(st.tuples(st.sampled_from(["sum", "gather", "root"]), st.integers(1, 2000)), max_size=30),
    first_turn=st.sampled_from([0, 2**31 - 3, 2**32 - 3]),
)
def test_any_sequence(size: int, calls: list[tuple[str, int]], first_turn: int) -> None:
    """More ranks than cores, and turns that start again from 0."""
    channel = make_channel(size)
    lines = channel[64 : 64 * (1 + size)].view(size, 64)
    lines[:, :4].view(torch.int32)[:] = first_turn - (2**32 if first_turn >= 2**31 else 0)

    def run(rank: int) -> list[Tensor]:
        results = []
        for index, (kind, count) in enumerate(calls):
            x = given_by(rank * 100 + index, (1, count), torch.float32)
            if kind == "gather":
                x = native.all_gather(x, channel, rank, size)
            elif kind == "sum":
                native.all_reduce(x, channel, rank, size)
            else:
                native.broadcast(x, index % size, channel, rank, size)
            results.append(x)
        return results

    results = on_ranks(size, run)
    for index, (kind, count) in enumerate(calls):
        parts = [given_by(rank * 100 + index, (1, count), torch.float32) for rank in range(size)]
        expected = {"gather": torch.cat(parts, 1), "sum": reduce(torch.add, parts), "root": parts[index % size]}[kind]
        assert all(torch.equal(of_rank[index], expected) for of_rank in results)


@implementations
def test_a_rank_that_waits_alone_goes_on_once_the_group_ends(cpu: ModuleType) -> None:
    channel = make_channel(2)
    waiting = threading.Thread(target=cpu.all_reduce, args=(torch.ones(3), channel, 0, 2), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and not channel_ended(channel)
    assert channel_turns(channel, 2) == [1, 0]  # the rank that it waits for
    end_channel(channel)
    waiting.join(10)
    assert not waiting.is_alive() and channel_ended(channel)
    cpu.broadcast(torch.ones(3), 1, channel, 0, 2)  # nor does it wait again


@implementations
def test_ranks_that_do_not_do_the_same_end_the_group(cpu: ModuleType) -> None:
    channel = make_channel(2)
    on_ranks(2, lambda rank: cpu.all_reduce(torch.ones(3 + rank), channel, rank, 2))
    assert channel_ended(channel)


@implementations
def test_ranks_that_expect_other_rows_end_the_group(cpu: ModuleType) -> None:
    channel = make_channel(2)
    routes = [Routes.of([0, 1 + rank, 2 - rank, 0], 2) for rank in range(2)]
    x = torch.ones(3, 4)
    on_ranks(2, lambda rank: cpu.all_to_all(x.clone(), routes[rank].rows, routes[rank].starts, channel, rank, 2))
    assert channel_ended(channel)


def test_time_in_which_a_rank_waits_is_counted() -> None:
    channel = make_channel(2)
    first = threading.Thread(target=native.all_reduce, args=(torch.ones(3), channel, 0, 2), daemon=True)
    first.start()
    first.join(0.05)
    native.all_reduce(torch.ones(3), channel, 1, 2)
    first.join(10)
    assert 0.02 < channel_waited(channel, 0) < 10
    assert channel_waited(channel, 1) < channel_waited(channel, 0)


def test_recorded_steps_have_collectives() -> None:
    """Replayed with other numbers, without coming back to Python in between."""
    channel = make_channel(2)
    inputs = [torch.zeros(4, 64) for _ in range(2)]
    weight = torch.ones(64)
    barrier = threading.Barrier(2)

    def run(rank: int) -> tuple[list[Tensor], int]:
        def step() -> Tensor:
            x = ops.silu_and_mul(inputs[rank].repeat(1, 2), None)
            ops.all_reduce(x, channel, rank, 2)
            ops.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5, None)
            return ops.all_gather(x, channel, rank, 2)

        recorded = record(step, Memory())
        results = []
        for seed in range(3):
            inputs[rank].copy_(given_by(seed + rank, (4, 64), torch.float32))
            barrier.wait()
            recorded.replay()
            results.append(recorded.output.clone())
            barrier.wait()
        return results, len(recorded.native)

    (first, parts), (second, _) = on_ranks(2, run)
    assert parts <= 2  # what torch does before, then all of ours
    for seed in range(3):
        x = sum(native.silu_and_mul(given_by(seed + rank, (4, 64), torch.float32).repeat(1, 2)) for rank in range(2))
        assert isinstance(x, Tensor)
        assert torch.equal(first[seed], torch.cat([x, x], 1)) and torch.equal(second[seed], first[seed])


def test_recorded_steps_send_other_rows_each_time() -> None:
    channel, counts = make_channel(2), ([0, 2, 1, 0], [1, 0, 2, 0], [0, 0, 0, 3])
    all_routes = [Routes.of(of_step, 2) for of_step in counts]
    barrier = threading.Barrier(2)

    def run(rank: int) -> list[Tensor]:
        x, rows, starts = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)

        def step() -> Tensor:
            ops.all_to_all(x, rows, starts, channel, rank, 2)
            return x

        recorded = record(step, Memory())
        results = []
        for routes in all_routes:
            x.copy_(given_by(rank, (3, 8), torch.float32))
            rows.copy_(routes.rows)
            starts.copy_(routes.starts)
            barrier.wait()
            recorded.replay()
            results.append(x.clone())
        return results

    parts = [given_by(rank, (3, 8), torch.float32) for rank in range(2)]
    for rank, results in enumerate(on_ranks(2, run)):
        for routes, result in zip(all_routes, results, strict=True):
            assert torch.equal(result, routes.expected(rank, parts))


@pytest.mark.parametrize(
    ("x", "rank", "size", "message"),
    [
        (torch.ones(4, 4).t(), 0, 2, "contiguous"),
        (torch.ones(4), 2, 2, "rank 2 is none of 2"),
        (torch.ones(4), 0, 3, "a channel of 3 ranks is uint8"),
    ],
)
def test_wrong_arguments_are_refused(x: Tensor, rank: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.all_reduce(x, make_channel(2), rank, size)
