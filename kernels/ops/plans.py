"""Plans of attention: the work of each program, decided once per step for all layers with the same attention.

They are made on the device, from the lengths there. Only short queries in Triton need one: otherwise it is None.
"""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels import backends
from pagewire.kernels.ops.attention import SHORT_QUERY


def plan_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    sliding_window: int,
    split_size: int,
) -> Tensor | None:
    """Makes the plan of `paged_attention` for tensors of these shapes and dtypes, with this query_start_loc and
    these seq_lens."""
    if min_query_len > SHORT_QUERY or not _is_planned(seq_lens):
        return None
    plan = backends.find("triton", "attention", "plan_attention")
    return plan(query, kv_cache, block_table, query_start_loc, seq_lens, max_query_len, sliding_window, split_size)


def plan_latent_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    split_size: int,
) -> Tensor | None:
    """Makes the plan of `latent_attention`, as `plan_attention` does for `paged_attention`."""
    if min_query_len > SHORT_QUERY or not _is_planned(seq_lens):
        return None
    plan = backends.find("triton", "latent", "plan_latent_attention")
    return plan(query, kv_cache, block_table, query_start_loc, seq_lens, max_query_len, split_size)


def _is_planned(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu":
        return tensor.device.type == "cuda"
    return backends.cpu_backend() == "triton"
