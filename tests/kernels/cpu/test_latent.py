"""Latent attention on the CPU, C++ and plain torch, against the reference."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels import reference
from tests.kernels.batches import LatentBatch, make_latent_batch, make_latents
from tests.kernels.implementations import fallback, native
from tests.sweep import examples

pytestmark = pytest.mark.pairs

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCES)

implementations = pytest.mark.parametrize(
    "cpu", [native, fallback], ids=lambda module: module.__name__.rpartition(".")[2]
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_matches_reference(cpu: ModuleType, batch: LatentBatch) -> None:
    actual = cpu.latent_attention(*batch.args())
    expected = reference.latent_attention(*batch.exact().args())
    tolerance = TOLERANCES[batch.query.dtype]
    assert actual.dtype == batch.query.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


@implementations
@dtypes
@pytest.mark.parametrize(("num_heads", "latent_dim", "rotary_dim"), [(16, 512, 64), (6, 32, 8), (40, 40, 16)])
def test_ragged_mixes(cpu: ModuleType, dtype: torch.dtype, num_heads: int, latent_dim: int, rotary_dim: int) -> None:
    """DeepSeek's sizes and others; 40 heads are attended in groups."""
    for mix in (([1, 1, 1], [0, 31, 700]), ([0, 1, 7, 33, 60], [0, 90, 5, 40, 100])):
        assert_matches_reference(cpu, make_latent_batch(*mix, num_heads, latent_dim, rotary_dim, dtype=dtype))


@settings(max_examples=examples(30), deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400)), min_size=1, max_size=4),
    num_heads=st.sampled_from([1, 2, 5, 16, 17, 24]),
    latent_dim=st.integers(1, 20).map(lambda n: 8 * n),
    rotary_dim=st.integers(1, 8).map(lambda n: 8 * n),
    block_size=st.sampled_from([1, 16, 24]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    requests: list[tuple[int, int]],
    num_heads: int,
    latent_dim: int,
    rotary_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    query_lens, context_lens = ([*lens] for lens in zip(*requests, strict=True))
    batch = make_latent_batch(
        query_lens, context_lens, num_heads, latent_dim, rotary_dim, dtype=dtype, block_size=block_size, seed=seed
    )
    assert_matches_reference(native, batch)


def test_a_request_does_not_depend_on_its_neighbours_or_on_threads() -> None:
    batch = make_latent_batch([1, 30, 1], [900, 5, 40], 16, 64, 16, dtype=torch.bfloat16)
    together = native.latent_attention(*batch.args())
    alone = replace(
        batch,
        query=batch.query[:1],
        block_table=batch.block_table[:1],
        query_start_loc=batch.query_start_loc[:2],
        seq_lens=batch.seq_lens[:1],
    )
    assert torch.equal(native.latent_attention(*alone.args()), together[:1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(native.latent_attention(*batch.args()), together)
    finally:
        torch.set_num_threads(threads)


@implementations
@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("latent_dim", "rotary_dim"), [(512, 64), (40, 8), (24, 48)])
def test_what_is_stored(
    cpu: ModuleType, dtype: torch.dtype, interleaved: bool, latent_dim: int, rotary_dim: int
) -> None:
    latents = make_latents(dtype, 19, 3, latent_dim, rotary_dim, interleaved=interleaved)
    expected = latents.copy()
    cpu.rotary_store_latent(*latents.args())
    reference.rotary_store_latent(*expected.args())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(latents.query, expected.query, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(latents.kv_cache, expected.kv_cache, atol=tolerance, rtol=tolerance)


@implementations
@dtypes
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_outputs", "num_inputs"), [(1, 512, 128), (5, 30, 33), (40, 17, 64)])
def test_products_of_each_head(
    cpu: ModuleType, dtype: torch.dtype, transposed: bool, num_tokens: int, num_outputs: int, num_inputs: int
) -> None:
    x = torch.randn(num_tokens, 3, num_inputs + 8).to(dtype)[..., :num_inputs]
    weight = (torch.randn(3, num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    wider = torch.full((num_tokens, 3, num_outputs + 8), 7.0, dtype=dtype)
    cpu.head_linear(x, weight, wider[..., :num_outputs])
    expected = torch.einsum("thk,hnk->thn", x.float(), weight.float())
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(wider[..., :num_outputs].float(), expected, atol=tolerance, rtol=tolerance)
    assert torch.all(wider[..., num_outputs:] == 7), "it wrote past its result"


def test_wrong_arguments_are_refused() -> None:
    batch = make_latent_batch([1], [20], 4, 32, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="kv_cache must be"):
        native.latent_attention(*replace(batch, kv_cache=batch.kv_cache.bfloat16()).args())
    with pytest.raises(ValueError, match="multiples of 8"):
        native.latent_attention(*replace(batch, latent_dim=33).args())
    latents = make_latents(torch.float32, 4, 2, 32, 8)
    with pytest.raises(ValueError, match="do not fit a latent part of 32"):
        native.rotary_store_latent(*replace(latents, query=latents.query[..., :36]).args())
    with pytest.raises(ValueError, match="head_linear"):
        native.head_linear(torch.zeros(2, 3, 8), torch.zeros(3, 4, 9), torch.zeros(2, 3, 4))
