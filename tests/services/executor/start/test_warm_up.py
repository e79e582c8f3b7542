"""The kernels that the warm-up compiles, by which constants the launchers ask for."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagewire.kernels import tuning
from pagewire.kernels.ops import SHORT_QUERY
from pagewire.kernels.triton.attention import decode_attention, paged_attention, prefill_attention, split_plan
from pagewire.kernels.triton.latent import latent_attention
from pagewire.services.executor.start.warm_up import warm_up_steps
from pagewire.services.executor.step.limits import Limits


class Compiled(set[tuple[Any, ...]]):
    """A stand-in for a Triton kernel that notes which constants it would be compiled for."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.add(tuple(sorted(constants.items())))


class Launched(list[str]):
    """Returns the kernels that were launched."""

    def kernel(self, name: str) -> dict[int, Callable[..., None]]:
        return defaultdict(lambda: lambda *args, **constants: self.append(name))


@pytest.mark.parametrize(
    ("query_lens", "kernels"),
    [
        ((1, 1), ["plan", "decode"]),
        ((16, 1), ["plan", "decode"]),
        ((17, 40), ["prefill"]),
        ((40, 1), ["plan", "decode", "prefill"]),
    ],
    ids=str,
)
def test_kernels_without_a_query_are_not_launched(
    query_lens: tuple[int, int], kernels: list[str], monkeypatch: pytest.MonkeyPatch
):
    launched = Launched()
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setattr(split_plan, "split_plan_kernel", launched.kernel("plan"))
    monkeypatch.setattr(decode_attention, "decode_attention_kernel", launched.kernel("decode"))
    monkeypatch.setattr(prefill_attention, "prefill_attention_kernel", launched.kernel("prefill"))
    table, start_loc, seq_lens = (torch.empty(size, dtype=torch.int32, device="meta") for size in ((2, 64), 3, 2))
    tables = (table, start_loc, seq_lens, max(query_lens), min(query_lens), 1.0)
    query = torch.empty(sum(query_lens), 32, 64, dtype=torch.bfloat16, device="meta")
    paged_attention.paged_attention(
        query, torch.empty(1, 2, 8, 16, 64, dtype=query.dtype, device="meta"), *tables, 0, 0.0, None, None, 0, None
    )
    assert launched == kernels
    launched.clear()
    latents = torch.empty(1, 16, 64, dtype=query.dtype, device="meta")
    latent_attention.latent_attention(query, latents, *tables, 48, 0, None)
    assert launched == kernels


def test_tiles_of_a_prompt_are_the_same_beside_decodes_and_padding(monkeypatch: pytest.MonkeyPatch):
    compiled = Compiled()
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setattr(prefill_attention, "prefill_attention_kernel", compiled)
    for num_reqs, num_tokens, longest in ((1, 512, 512), (64, 512, 449), (257, 512, 512), (31, 512, 512)):
        query = torch.empty(num_tokens, 32, 128, dtype=torch.bfloat16, device="meta")
        kv_cache = torch.empty(1, 2, 8, 16, 128, dtype=query.dtype, device="meta")
        sizes = ((num_reqs, 64), (num_reqs + 1,), (num_reqs,))
        table, start_loc, seq_lens = (torch.empty(size, dtype=torch.int32, device="meta") for size in sizes)
        paged_attention.paged_attention(
            query, kv_cache, table, start_loc, seq_lens, longest, SHORT_QUERY + 1, 1.0, 0, 0.0, None, None, 0, None
        )
    assert len({dict(constants)["BLOCK_M"] for constants in compiled}) == 1


@pytest.mark.parametrize("architecture", [80, 89, 90])
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (9, 3)], ids=str)
@pytest.mark.parametrize("max_num_seqs", [100, 256, 1000])
@pytest.mark.parametrize("max_num_batched_tokens", [64, 2048])
def test_warm_up_compiles_all_attention_kernels(
    architecture: int,
    heads: tuple[int, int],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
):
    compiled = Compiled()
    monkeypatch.setattr(tuning, "capability_of", lambda device: architecture)
    monkeypatch.setattr(decode_attention, "decode_attention_kernel", compiled)
    monkeypatch.setattr(split_plan, "split_plan_kernel", compiled)
    monkeypatch.setattr(prefill_attention, "prefill_attention_kernel", compiled)
    head_dim = 64

    def launch(num_reqs: int, longest: int) -> None:
        query = torch.empty(num_reqs - 1 + longest, heads[0], head_dim, device="meta")
        kv_cache = torch.empty(1, 2, heads[1], 16, head_dim, device="meta")
        table = torch.empty(num_reqs, 64, dtype=torch.int32, device="meta")
        start_loc, seq_lens = (torch.empty(num_reqs + n, dtype=torch.int32, device="meta") for n in (1, 0))
        paged_attention.paged_attention(
            query, kv_cache, table, start_loc, seq_lens, longest, 1, 1.0, 0, 0.0, None, None, 0, None
        )

    limits = Limits(max_num_seqs, max_num_batched_tokens, 4096, 16)
    for num_reqs, num_tokens in warm_up_steps(limits):
        assert num_tokens <= max_num_batched_tokens
        launch(num_reqs, num_tokens - num_reqs + 1)
    warm = set(compiled)
    for num_reqs in (1, 2, 3, 7, 8, 9, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1000):
        for longest in (*range(1, 18), 32, 33, 65, 100, 128, 129, 256, 257, 513, 1024, 2048):
            if num_reqs <= max_num_seqs and num_reqs - 1 + longest <= max_num_batched_tokens:
                launch(num_reqs, longest)
                assert compiled == warm, (num_reqs, longest)
