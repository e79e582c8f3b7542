"""The work of prefill attention on sm_90, counted in its machine code."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.kernels.grids import forms_of
from benchmarks.kernels.prefill_counts import FORMS, PROMPT, Loop, configurations, loops, tabled


def some(forms: Sequence[tuple[int, int]]) -> list[Any]:
    """Marks all forms but that of 128 numbers a head in pages of 16 as part of the full sweep."""
    return [form if form == (128, 16) else pytest.param(*form, marks=pytest.mark.slow) for form in forms]


def counted(head_dim: int, block_size: int) -> tuple[Loop, list[Loop]]:
    """Returns the form of the table, and the others."""
    table = tabled(head_dim, block_size)
    by_config = list(zip(configurations(head_dim, block_size), loops(head_dim, block_size), strict=True))
    (chosen,) = (loop for config, loop in by_config if config == table)
    return chosen, [loop for config, loop in by_config if config != table]


@pytest.mark.parametrize(("head_dim", "block_size"), some(list(FORMS)))
def test_the_table_has_the_form_that_keeps_tensor_cores_busiest(head_dim: int, block_size: int) -> None:
    chosen, others = counted(head_dim, block_size)
    assert chosen.busy > max(loop.busy for loop in others) - 0.01
    assert chosen.spills == 0
    # The scores have to be there before they are weighed; nothing else is waited for.
    assert chosen.waits == 1


@pytest.mark.parametrize(("head_dim", "block_size"), some([(128, 16), (128, 64), (64, 16), (64, 64)]))
def test_two_programs_take_turns(head_dim: int, block_size: int) -> None:
    chosen, _ = counted(head_dim, block_size)
    assert (chosen.rows, chosen.programs) == (128, 2)
    assert chosen.turn / 2 <= max(chosen.tensor, chosen.issue), "together they wait for each other"


@pytest.mark.slow
def test_copies_by_tma_take_fewer_instructions() -> None:
    by_addresses = loops(128, 16)[0]
    by_tma = loops(128, 64)[1]
    assert (by_tma.rows, by_tma.keys, by_tma.warps) == (by_addresses.rows, by_addresses.keys, by_addresses.warps)
    assert by_tma.instructions < 0.9 * by_addresses.instructions


@pytest.mark.parametrize(("head_dim", "block_size"), FORMS)
def test_what_the_table_has_is_tuned(head_dim: int, block_size: int) -> None:
    chosen = tabled(head_dim, block_size)
    shape = PROMPT | {"head_dim": head_dim, "block_size": block_size}
    assert any(chosen.items() <= form.items() for form in forms_of("prefill_attention", shape, chosen)[1:])
