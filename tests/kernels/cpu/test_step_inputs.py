"""The op step_inputs on the CPU against the reference, over several steps of the same rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import reference
from tests.kernels.batches import StepRows, make_step
from tests.kernels.implementations import native
from tests.sweep import examples

BLOCK_SIZE, MAX_NUM_SEQS = StepRows.BLOCK_SIZE, StepRows.MAX_NUM_SEQS


@settings(max_examples=examples(50), deadline=None)
@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, MAX_NUM_SEQS - 1), st.integers(1, 9), st.booleans()),
            min_size=1,
            max_size=MAX_NUM_SEQS,
            unique_by=lambda entry: entry[0],
        ),
        min_size=1,
        max_size=5,
    )
)
def test_step_inputs_over_several_steps(steps: list[list[tuple[int, int, bool]]]) -> None:
    state = StepRows()
    expected_state = state.clone()
    for step in steps:
        batch = [(-1 if padding else row, query_len) for row, query_len, padding in step]
        actual, expected = make_step(state, batch), make_step(expected_state, batch)
        native.step_inputs(**actual, block_size=BLOCK_SIZE)
        reference.step_inputs(**expected, block_size=BLOCK_SIZE)
        for name, tensor in actual.items():
            assert torch.equal(tensor, expected[name]), name
    assert state.num_computed_tokens.tolist() == state.lengths


def test_step_inputs_checks_dtypes() -> None:
    step = make_step(StepRows(), [(0, 3)])
    with pytest.raises(TypeError, match="contiguous rows"):
        native.step_inputs(**{**step, "rows": step["rows"].long()}, block_size=BLOCK_SIZE)
