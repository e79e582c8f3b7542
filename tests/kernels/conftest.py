from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.processor import BF16_FORMS, bf16_multiplied_as


@pytest.fixture(params=BF16_FORMS, ids=["fastest", "bf16 pairs", "floats", "fixed point"])
def bf16_form(request: pytest.FixtureRequest) -> Iterator[int]:
    """Sets how bf16 is multiplied (csrc/common/processor.h): the fastest way here, then each way without a
    matrix unit."""
    with bf16_multiplied_as(request.param):
        yield request.param
