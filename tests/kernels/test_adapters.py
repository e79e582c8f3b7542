"""Products of adapters on the CPU, C++ and plain torch, against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import ops
from pagewire.kernels.cpu import recording
from tests.kernels.adapter_batches import AdapterBatch, adapter_batches
from tests.kernels.implementations import fallback, native
from tests.sweep import examples

cpu = pytest.mark.parametrize("cpu", [native, fallback], ids=["cpp", "torch"])


@cpu
@given(batch=adapter_batches())
@settings(max_examples=examples(150), deadline=None)
def test_products_are_added(cpu: ModuleType, batch: AdapterBatch) -> None:
    batch.check(cpu.add_adapters)


@given(batch=adapter_batches(), threads=st.integers(1, 3), data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_token_depends_on_no_other(batch: AdapterBatch, threads: int, data: st.DataObject) -> None:
    """Each bit of a token's outputs is the same among other tokens, and on any number of threads."""
    together = batch.run(native.add_adapters)
    chosen = data.draw(st.lists(st.integers(0, max(0, len(together) - 1)), max_size=4)) if len(together) else []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = batch.of_tokens(chosen).run(native.add_adapters)
        assert torch.equal(batch.run(native.add_adapters), together)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together[chosen])


def test_many_tokens_are_as_each_alone() -> None:
    """A prompt's tokens, in all passes and blocks that they are divided into."""
    batch = AdapterBatch.random([0] * 130 + [-1, 1] * 5, torch.bfloat16, inputs=96, outputs=(80, 300), rank=16)
    together = batch.run(native.add_adapters)
    for token in (0, 47, 48, 129, 131, 139):
        assert torch.equal(batch.of_tokens([token]).run(native.add_adapters), together[[token]])


def test_a_recorded_call_reads_slots_and_ranks_anew() -> None:
    batch = AdapterBatch.random([0, -1, 1, 1], torch.float32, inputs=40, outputs=(24, 16), rank=8)
    base = batch.out.clone()

    def step() -> torch.Tensor:
        ops.add_adapters(*batch.args())
        return batch.out

    recorded = recording.record(step, recording.Memory())
    for slots, ranks in (([1, 0, -1, 0], [[8, 3], [0, 5]]), ([-1] * 4, [[8, 8]] * 2), ([0] * 4, [[0, 0], [1, 1]])):
        batch.slots.copy_(torch.tensor(slots))
        batch.ranks.copy_(torch.tensor(ranks))
        batch.out.copy_(base)
        expected = batch.run(native.add_adapters)
        recorded.replay()
        assert torch.equal(batch.out, expected)


def test_wrong_arguments_are_named() -> None:
    batch = AdapterBatch.random([0, 1], torch.float32, inputs=8, outputs=(8,), rank=4)
    out, x, down, up, slots, starts, ranks = batch.args()
    with pytest.raises(ValueError, match=r"up must be torch.float32 \[2, 4, 8\], not torch.float32 \[2, 8, 4\]"):
        native.add_adapters(out, x, down, up.mT.contiguous(), slots, starts, ranks)
    with pytest.raises(ValueError, match="down, up, slots, starts and ranks must be contiguous"):
        native.add_adapters(out, x, down, up.mT.contiguous().mT, slots, starts, ranks)
    with pytest.raises(IndexError, match="there is no slot 2 of 2"):
        native.add_adapters(out, x, down, up, slots + 1, starts, ranks)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        native.add_adapters(out.double(), x, down, up, slots, starts, ranks)
