from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.cpu.packed_linear import set_bf16_form


@pytest.fixture(params=[0, 1, 2, 3], ids=["fastest", "bf16 pairs", "floats", "fixed point"])
def bf16_form(request: pytest.FixtureRequest) -> Iterator[int]:
    """How bf16 is multiplied (kernels/cpu/processor.h): as is fastest here, then in all ways without a matrix unit."""
    set_bf16_form(request.param)
    yield request.param
    set_bf16_form(0)
