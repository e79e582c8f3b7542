"""Attention without a cache, C++ and plain torch, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import reference
from tests.kernels.batches import EncoderBatch
from tests.kernels.implementations import fallback, native
from tests.sweep import examples

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 7, 16, 17, 40, 129, 300]), min_size=1, max_size=4).filter(sum),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    head_dim=st.sampled_from([8, 32, 40, 64, 128]),
    window=st.sampled_from([0, 0, 1, 20, 150]),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_encoder_attention(
    lengths: list[int], heads: tuple[int, int], head_dim: int, window: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch = EncoderBatch.of(lengths, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=dtype)
    expected = reference.encoder_attention(*batch.args(window)).float()
    for cpu in (native, fallback):
        actual = cpu.encoder_attention(*batch.args(window)).float()
        torch.testing.assert_close(actual, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("window", [0, 30])
def test_a_request_is_independent_of_its_neighbours(window: int) -> None:
    together = EncoderBatch.of([70, 300, 5])
    all_rows = native.encoder_attention(*together.args(window))
    for start, end in ((0, 70), (70, 370), (370, 375)):
        alone = EncoderBatch(together.qkv[start:end], 2, 2, torch.tensor([0, end - start]).int(), end - start)
        assert torch.equal(native.encoder_attention(*alone.args(window)), all_rows[start:end])


def test_what_does_not_fit_together_is_refused() -> None:
    query, key, value, *rest = EncoderBatch.of([4]).args()
    with pytest.raises(ValueError, match="do not fit together"):
        native.encoder_attention(query, key[:3], value, *rest)
    with pytest.raises(ValueError, match="multiple of 8"):
        native.encoder_attention(query[..., :12], key[..., :12], value[..., :12], *rest)
