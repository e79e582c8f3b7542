"""Attention kernels to measure ours against, each as a call per buffer set: torch's, FlexAttention, FA3, FlashInfer.

Every peer gets the KV cache in the layout it likes best, made beforehand: torch's kernels contiguous keys and values
(the gather from pages is not in their time), FlashAttention 3 its own page layout. What they plan on the host is not
in their time either, but printed.

`python -m benchmarks.gpu.peer_kernels.attention decode|prefill|sampling` compiles FlashInfer's kernels and ends.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cases.attention_inputs import TOLERANCE, AttentionInputs, AttentionShape, error, make_inputs
from benchmarks.gpu.cases.case import Contestant
from benchmarks.gpu.measure import Call
from benchmarks.gpu.peer_kernels import files as peer_files

FLASHINFER_WORKSPACE_BYTES = 384 << 20


def contestant(calls: list[Call], inputs: AttentionInputs, planning_seconds: float = 0.0) -> Contestant:
    """Checked like ours; what the calls return is `_flat`'s to read."""
    return Contestant(calls, lambda: error(_flat(calls[0](), inputs), inputs), TOLERANCE, planning_seconds)


def _planned(plan: Callable[[], object]) -> float:
    """Plans twice; seconds of the second time, until the device is done. The first one may compile."""
    plan()
    torch.cuda.synchronize()
    started = time.perf_counter()
    plan()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _flat(output: Any, inputs: AttentionInputs) -> Tensor:
    """[num_tokens, num_heads, head_dim], also from heads before tokens, and from groups folded into the query."""
    shape = inputs.shape
    if output.dim() == 4:
        query_len, num_reqs = inputs.max_query_len, len(shape.seq_lens)
        output = output.reshape(num_reqs, shape.num_heads, query_len, shape.head_dim).transpose(1, 2)
    return output.reshape(-1, shape.num_heads, shape.head_dim)


def contiguous_kv(inputs: AttentionInputs, index: int) -> Tensor:
    """Returns keys and values [2, num_reqs, num_kv_heads, seq_len, head_dim] of a uniform batch."""
    pages = inputs.kv_caches[index][
        inputs.block_table.long()
    ]  # [num_reqs, num_pages, 2, num_kv_heads, block, head_dim]
    num_reqs, num_pages, _, num_kv_heads, block_size, head_dim = pages.shape
    gathered = pages.permute(2, 0, 3, 1, 4, 5).reshape(2, num_reqs, num_kv_heads, num_pages * block_size, head_dim)
    return gathered[:, :, :, : inputs.shape.seq_lens[0]].contiguous()


def _heads_first(inputs: AttentionInputs, index: int) -> Tensor:
    """[num_reqs, num_heads, query_len, head_dim] of a uniform batch."""
    query = inputs.queries[index].view(
        len(inputs.shape.seq_lens), inputs.max_query_len, *inputs.queries[index].shape[1:]
    )
    return query.transpose(1, 2).contiguous()


def sdpa(inputs: AttentionInputs) -> Contestant:
    """Returns torch's scaled_dot_product_attention. The heads of a group become the query of one token."""
    calls: list[Call] = []
    shape, query_len = inputs.shape, inputs.max_query_len
    for index in range(len(inputs.queries)):
        key, value = contiguous_kv(inputs, index)
        query = _heads_first(inputs, index)
        if query_len == 1:
            query = query.reshape(len(shape.seq_lens), shape.num_kv_heads, -1, shape.head_dim)
            calls.append(partial(F.scaled_dot_product_attention, query, key, value, scale=inputs.scale))
        elif query_len == shape.seq_lens[0]:
            calls.append(
                partial(
                    F.scaled_dot_product_attention,
                    query,
                    key,
                    value,
                    is_causal=True,
                    scale=inputs.scale,
                    enable_gqa=True,
                )
            )
        else:
            raise peer_files.PeerMissingError("torch's SDPA has no fast kernel for a causal query behind a context")
    return contestant(calls, inputs)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(inputs: AttentionInputs) -> Contestant:
    """FlexAttention, compiled for the shape."""
    from torch.nn.attention.flex_attention import create_block_mask

    query_len, seq_len = inputs.max_query_len, inputs.shape.seq_lens[0]
    device = inputs.queries[0].device.type
    context_len = seq_len - query_len
    mask = None
    if query_len > 1:
        mask = create_block_mask(
            lambda b, h, q, kv: kv <= q + context_len, None, None, query_len, seq_len, device=device
        )
    calls: list[Call] = []
    for index in range(len(inputs.queries)):
        key, value = contiguous_kv(inputs, index)
        arguments = {"block_mask": mask, "scale": inputs.scale, "enable_gqa": True}
        calls.append(partial(_compiled_flex(), _heads_first(inputs, index), key, value, **arguments))
    return contestant(calls, inputs)


def fa3(inputs: AttentionInputs) -> Contestant:
    """FlashAttention 3 over pages; how it splits is found out beforehand."""
    ops, shape = peer_files.fa3(), inputs.shape
    max_seq_len = max(shape.seq_lens)

    def plan() -> Tensor:
        schedule: Tensor = ops.get_scheduler_metadata(
            len(shape.seq_lens), inputs.max_query_len, max_seq_len, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, shape.head_dim, shape.dtype, inputs.seq_lens, inputs.query_start_loc, None, None, None,
            None, shape.block_size, 0, True, -1, -1, False, 0, None, 0,
        )  # fmt: skip
        return schedule

    schedule, planning_seconds = plan(), _planned(plan)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = ops.fwd(
            query, key, value, None, None, None, None, inputs.query_start_loc, None, None, None, inputs.seq_lens,
            inputs.max_query_len, max_seq_len, inputs.block_table, None, None, None, None, None, None, None, None,
            inputs.scale, True, -1, -1, 0.0, True, schedule, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip
        return output

    calls: list[Call] = []
    for query, cache in zip(inputs.queries, inputs.kv_caches, strict=True):
        # Its pages are [block_size, num_kv_heads, head_dim].
        key, value = (cache[:, part].transpose(1, 2).contiguous() for part in (0, 1))
        calls.append(partial(call, query, key, value))
    return contestant(calls, inputs, planning_seconds)


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _page_lists(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's page table: int32 page counts summed [num_reqs + 1], page ids, tokens in each last page."""
    block_size = inputs.shape.block_size
    num_pages = -(-inputs.seq_lens // block_size)
    starts = F.pad(num_pages.cumsum(0), (1, 0)).int()
    ids = torch.cat([row[:count] for row, count in zip(inputs.block_table, num_pages.tolist(), strict=True)])
    return starts, ids, (inputs.seq_lens - (num_pages - 1) * block_size).int()


def flashinfer_decode(inputs: AttentionInputs, tensor_cores: bool) -> Contestant:
    """FlashInfer's batch decode, planned beforehand; its pages are ours."""
    shape = inputs.shape
    starts, ids, last_page = _page_lists(inputs)
    wrapper = peer_files.flashinfer().BatchDecodeWithPagedKVCacheWrapper(
        _workspace(ids.device), "HND", use_cuda_graph=True, use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=starts.clone(), paged_kv_indices_buffer=ids.clone(),
        paged_kv_last_page_len_buffer=last_page.clone(), backend="fa2",
    )  # fmt: skip
    planning_seconds = _planned(
        lambda: wrapper.plan(
            starts, ids, last_page, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size,
            q_data_type=shape.dtype, kv_data_type=shape.kv_dtype, sm_scale=inputs.scale,
        )
    )  # fmt: skip
    return contestant(_runs(wrapper, inputs), inputs, planning_seconds)


def flashinfer_prefill(inputs: AttentionInputs) -> Contestant:
    """FlashInfer's batch prefill with the backend it chooses."""
    shape = inputs.shape
    starts, ids, last_page = _page_lists(inputs)
    wrapper = peer_files.flashinfer().BatchPrefillWithPagedKVCacheWrapper(
        _workspace(ids.device), "HND", use_cuda_graph=True, qo_indptr_buf=inputs.query_start_loc.clone(),
        paged_kv_indptr_buf=starts.clone(), paged_kv_indices_buf=ids.clone(),
        paged_kv_last_page_len_buf=last_page.clone(),
    )  # fmt: skip
    planning_seconds = _planned(
        lambda: wrapper.plan(
            inputs.query_start_loc, starts, ids, last_page, shape.num_heads, shape.num_kv_heads, shape.head_dim,
            shape.block_size, causal=True, q_data_type=shape.dtype, kv_data_type=shape.kv_dtype,
            sm_scale=inputs.scale,
        )
    )  # fmt: skip
    return contestant(_runs(wrapper, inputs), inputs, planning_seconds)


def _runs(wrapper: Any, inputs: AttentionInputs) -> list[Call]:
    return [partial(wrapper.run, *tensors) for tensors in zip(inputs.queries, inputs.kv_caches, strict=True)]


def _build(name: str) -> None:
    """Runs each kernel once, which compiles it."""
    device = torch.device("cuda")
    if name == "sampling":
        probs = torch.rand(2, 1024, device=device).softmax(-1)
        peer_files.flashinfer().sampling.top_k_top_p_sampling_from_probs(probs, 5, 0.9, seed=1, offset=0)
    for head_dim, num_heads, num_kv_heads in ((128, 32, 8), (64, 14, 2)) if name == "decode" else ():
        inputs = make_inputs(AttentionShape(num_heads, num_kv_heads, head_dim, 16, [1], [64]), device)
        flashinfer_decode(inputs, tensor_cores=True).calls[0]()
        if num_heads // num_kv_heads == 4:
            flashinfer_decode(inputs, tensor_cores=False).calls[0]()
    if name == "prefill":
        flashinfer_prefill(make_inputs(AttentionShape(32, 8, 128, 16, [64], [64]), device)).calls[0]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    _build(sys.argv[1])
