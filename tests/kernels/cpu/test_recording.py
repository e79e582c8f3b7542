"""A recorded function does what the function itself does, whatever is in its inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels import ops

if ops.cpu_backend() != "cpp":
    pytest.skip("there is no C++ compiler: steps are not recorded", allow_module_level=True)

from pagewire.kernels.cpu.recording import Memory, NotRecorded, record
from pagewire.kernels.cpu.runtime import library
from tests.kernels.batches import make_batch, one_layer_of_a_group
from tests.kernels.sampling_batches import Row, SamplingBatch
from tests.sweep import examples

SIZE = 32


def norm(x: Tensor) -> Tensor:
    return ops.add_rms_norm(x, torch.zeros_like(x), torch.ones(SIZE), 1e-5, None)


def halves(x: Tensor) -> Tensor:
    first, second = x.split(SIZE // 2, dim=1)
    return torch.cat([second, first], dim=1)


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0].add_(1)
    return y


STEPS = {
    "norm": norm,
    "gate": lambda x: ops.silu_and_mul(torch.cat([x, x * 2], dim=1), None),
    "transposed": lambda x: ops.silu_and_mul(torch.cat([x, x], dim=1).T.contiguous().T, None),  # copied within the op
    "linear": lambda x: ops.linear(x, torch.eye(SIZE) * 1.5, None, None),
    "torch's linear": lambda x: torch.nn.functional.linear(x, torch.eye(SIZE).flip(0)),
    "halves": halves,
    "in place": in_place,
    "view": lambda x: x.view(-1, 4).view(-1, SIZE),
    "drawn": lambda x: x + torch.arange(SIZE),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 999))
@settings(max_examples=examples(60), deadline=None)
def test_replays_compute_anew(names: list[str], num_rows: int, seed: int) -> None:
    def function() -> Tensor:
        result = x
        for name in names:
            result = STEPS[name](result)
        return result + 0

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, SIZE, generator=generator)
    with torch.inference_mode():
        expected = function()
        recorded = record(function, Memory())
        assert torch.equal(recorded.output, expected)
        for _ in range(2):
            x.copy_(torch.randn(num_rows, SIZE, generator=generator))
            expected = function()
            recorded.replay()
            assert torch.equal(recorded.output, expected)


def test_recordings_share_memory_but_for_their_outputs() -> None:
    memory = Memory()
    x = torch.randn(4, SIZE)

    def first() -> Tensor:
        return norm(norm(norm(x)))

    with torch.inference_mode():
        one = record(first, memory)
        two = record(lambda: norm(norm(one.output)), memory)  # a step's next part
        three = record(lambda: norm(norm(x)), memory)
        x.copy_(torch.randn(4, SIZE))
        three.replay()
        expected = norm(norm(first()))
        one.replay()
        two.replay()
        assert torch.equal(two.output, expected)
        assert len({recorded.output.data_ptr() for recorded in (one, two, three)}) == 3


def test_calls_of_other_threads_are_not_recorded() -> None:
    """Another one may be loading weights."""
    calls: list[int] = []

    class Recorder:
        def on_call(self, function: int, layout: str, arguments: tuple[Any, ...]) -> None:
            calls.append(function)

        def on_python(self, function: Callable[..., None], tensors: tuple[Tensor | None, ...]) -> None:
            raise AssertionError("there are none")

    x = torch.randn(4, SIZE)
    with library.recorded_by(Recorder()):
        other = threading.Thread(target=norm, args=(x,))
        other.start()
        other.join()
        assert not calls
        norm(x)
    assert len(calls) == 1


def test_what_torch_reads_is_no_memory_of_its_own() -> None:
    memory = Memory()
    x = torch.randn(4, SIZE)
    addresses = set()

    def function() -> Tensor:
        wide = norm(x)
        addresses.add(wide.data_ptr())
        return wide[:, :1].clone()

    with torch.inference_mode():
        recordings = [record(function, memory) for _ in range(4)]
        assert len(addresses) <= 2  # in turn with the norm's residual
        x.copy_(torch.randn(4, SIZE))
        for recorded in recordings:
            recorded.replay()
            assert torch.equal(recorded.output, norm(x)[:, :1])


def test_what_random_rows_are_drawn_from_is_no_memory_of_its_own() -> None:
    memory = Memory()
    batch = SamplingBatch(torch.randn(4, SIZE), [Row(temperature=1.0)] * 4)
    addresses = set()

    def function() -> Tensor:
        logits = norm(batch.logits)
        addresses.add(logits.data_ptr())
        return ops.sample_tokens(logits, *batch.args()[1:])

    recordings = []
    with torch.inference_mode():
        for _ in range(8):
            batch.num_tokens.zero_()
            recordings.append(record(function, memory))
        assert len(addresses) <= 3, "buffers of one size take turns"
        batch.logits.copy_(torch.randn(4, SIZE))
        batch.num_tokens.zero_()
        expected = function()
        for recorded in recordings:
            batch.num_tokens.zero_()
            recorded.replay()
            assert torch.equal(recorded.output, expected)


@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
def test_one_layer_of_a_group_s_cache(cache: str) -> None:
    """Written and attended to by a replay, at the strides that it has."""
    batch = make_batch(
        [1, 1], [40, 90], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16, cache=cache
    )
    _, view, scales = one_layer_of_a_group(batch.kv_cache, batch.kv_scales)
    batch = replace(batch, kv_cache=view, kv_scales=scales)
    last = batch.seq_lens.long() - 1
    slots = batch.block_table[torch.arange(2), last // 16].long() * 16 + last % 16
    key, value = torch.randn(2, 2, 2, 64).bfloat16()
    arguments = batch.args()

    def function() -> Tensor:
        ops.store_kv(key, value, view, slots, batch.kv_scales)
        return ops.paged_attention(*arguments)

    with torch.inference_mode():
        recorded = record(function, Memory())
        value.mul_(-3)
        expected = function().clone()
        view.view(torch.uint8)[slots // 16, :, :, slots % 16] = 0
        recorded.replay()
    assert torch.equal(recorded.output, expected)


def test_what_torch_computes_shares_memory_too() -> None:
    memory = Memory()
    x = torch.randn(4, SIZE)
    addresses = set()

    def function() -> Tensor:
        result = x
        for _ in range(9):
            result = result * 2 + 1
            addresses.add(result.data_ptr())
        return result

    with torch.inference_mode():
        recordings = [record(function, memory) for _ in range(3)]
        assert len(addresses) <= 6
        x.copy_(torch.randn(4, SIZE))
        expected = function()
        for recorded in recordings:
            recorded.replay()
            assert torch.equal(recorded.output, expected)


@pytest.mark.parametrize(
    "select", [lambda x: x[x > 0], lambda x: x.flatten()[(x > 0).flatten().nonzero()], lambda x: x.masked_select(x > 0)]
)
def test_refused_where_values_decide_on_shapes(select: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, SIZE)
    with torch.inference_mode(), pytest.raises(NotRecorded, match="a shape that depends on values"):
        record(lambda: select(x).sum(), Memory())


def test_refused_where_python_looks_at_a_result() -> None:
    x = torch.ones(2, SIZE)

    def branching() -> Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3

    with torch.inference_mode(), pytest.raises(NotRecorded, match="item") as caught:
        record(branching, Memory())
    assert torch.equal(caught.value.output, x * 2)
