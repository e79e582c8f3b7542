"""Tests what a tenant is charged for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.config.sampling_checks import resolve
from pagewire.services.scheduler.fairness.ledger import Ledger
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.common_pb2 import SamplingParams


@given(
    weight=st.sampled_from([1.0, 2.0]),
    num_prompt_tokens=st.integers(1, 50),
    steps=st.lists(st.integers(1, 20), max_size=12),
    losses=st.sets(st.integers(0, 11)),
)
def test_each_token_is_charged_once_however_often_its_blocks_are_lost(
    weight: float, num_prompt_tokens: int, steps: list[int], losses: set[int]
) -> None:
    ledger = Ledger()
    request = Request(1, list(range(num_prompt_tokens)), resolve(SamplingParams()))
    request.account = ledger.account("a", weight)
    ledger.count(request.account, running=1)
    num_outputs = reached = 0
    for number, size in enumerate(steps):
        if number in losses:
            request.num_computed_tokens = 0
        end = min(request.num_computed_tokens + size, len(request.token_ids))
        ledger.charge_prompt(request, end)
        request.num_computed_tokens, reached = end, max(reached, min(end, num_prompt_tokens))
        if end == len(request.token_ids):
            request.token_ids.append(7)
            ledger.charge_outputs([request], [1])
            num_outputs += 1
    assert request.account.served == pytest.approx((reached + 2 * num_outputs) / weight)
