"""Tokens with adapters, for tests of all implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a sum that is rounded once to the dtype.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class AdapterBatch:
    """The arguments of `add_adapters`. What lies between rows, and beyond a slot's ranks, is NaN."""

    out: Tensor
    x: Tensor
    down: Tensor
    up: Tensor
    slots: Tensor
    starts: Tensor
    ranks: Tensor

    @classmethod
    def random(
        cls,
        slots: Sequence[int],
        dtype: torch.dtype,
        *,
        inputs: int,
        outputs: Sequence[int],
        rank: int,
        ranks: Sequence[Sequence[int]] | None = None,
        x_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        gap: int = 0,
        seed: int = 0,
    ) -> AdapterBatch:
        """Returns a batch. outputs: those of each part. gap: between rows of out and x."""
        generator = torch.Generator().manual_seed(seed)
        num_slots = 1 + max((0, *slots))
        ranks = [[rank] * len(outputs)] * num_slots if ranks is None else ranks
        starts = [0, *accumulate(outputs)]
        down = torch.full((num_slots, len(outputs), rank, inputs), float("nan"), dtype=dtype)
        up = torch.full((num_slots, rank, starts[-1]), float("nan"), dtype=dtype)
        for slot, own in enumerate(ranks):
            for part, used in enumerate(own):
                down[slot, part, :used] = torch.randn(used, inputs, generator=generator) / inputs**0.5
                columns = slice(starts[part], starts[part + 1])
                up[slot, :used, columns] = torch.randn(used, outputs[part], generator=generator) / max(1, used) ** 0.5

        def rows(size: int, dtype: torch.dtype) -> Tensor:
            filled = torch.full((len(slots), size + gap), float("nan"), dtype=dtype)[:, :size]
            return filled.copy_(torch.randn(len(slots), size, generator=generator))

        indices = (torch.tensor(values, dtype=torch.int32) for values in (slots, starts, ranks))
        return cls(rows(starts[-1], out_dtype or dtype), rows(inputs, x_dtype or dtype), down, up, *indices)

    def args(self) -> tuple[Tensor, ...]:
        return (self.out, self.x, self.down, self.up, self.slots, self.starts, self.ranks)

    def of_tokens(self, tokens: Sequence[int]) -> AdapterBatch:
        return replace(self, out=self.out[tokens], x=self.x[tokens], slots=self.slots[tokens])

    def run(self, add_adapters: Callable[..., Any]) -> Tensor:
        """Returns the outputs; the batch stays as it is."""
        out = torch.full((self.out.shape[0], self.out.shape[1] + 3), 7.0, dtype=self.out.dtype)[:, :-3]
        out.copy_(self.out)
        add_adapters(out, *self.args()[1:])
        return out

    def check(self, add_adapters: Callable[..., Any]) -> None:
        """Compares an implementation with the reference; tokens without an adapter must not change in a bit."""
        actual, expected = self.run(add_adapters), self.run(reference.add_adapters)
        tolerance = TOLERANCES[self.out.dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(actual[self.slots < 0], self.out[self.slots < 0])


@st.composite
def adapter_batches(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES, max_tokens: int = 20, max_rank: int = 20
) -> AdapterBatch:
    """Draws batches with any ranks per slot and part, parts of any size, and tokens in any order of slots."""
    num_slots, rank = draw(st.integers(1, 4)), draw(st.integers(1, max_rank))
    outputs = draw(st.lists(st.integers(0, 90), min_size=1, max_size=3).filter(any))
    slots = draw(st.lists(st.integers(-1, num_slots - 1), max_size=max_tokens))
    own = st.lists(st.integers(0, rank), min_size=len(outputs), max_size=len(outputs))
    used = 1 + max((0, *slots))
    dtype = draw(st.sampled_from(dtypes))
    return AdapterBatch.random(
        slots,
        dtype,
        inputs=draw(st.integers(1, 90)),
        outputs=outputs,
        rank=rank,
        ranks=draw(st.lists(own, min_size=used, max_size=used)),
        x_dtype=draw(st.sampled_from([*dtypes, dtype])),
        out_dtype=draw(st.sampled_from([*dtypes, dtype])),
        gap=draw(st.sampled_from([0, 5])),
        seed=draw(st.integers(0, 99)),
    )
