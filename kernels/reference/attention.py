"""Attention over the paged KV cache, rotary embedding, and cache writes (`pagewire.kernels.ops.attention`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.reference.elementwise import rms_norm

# The largest value of float8_e4m3fn; larger values are stored as this.
FP8_MAX = 448.0


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    split_size: int,
    plan: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Request after request; longest and shortest query, `split_size` and `plan` make no difference to the result."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    output = torch.zeros_like(query, dtype=dtype)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for b, seq_len in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        query_len = end - start
        if query_len == 0 or seq_len == 0:
            continue
        # Block ids of tokens that no query sees any longer are stale.
        seen = seq_len - query_len - sliding_window + 1 if sliding_window > 0 else 0
        first_page = max(0, seen) // block_size
        blocks = block_table[b, first_page : -(-seq_len // block_size)].long()
        pages = kv_cache[blocks].float()
        if kv_scales is not None:
            pages *= kv_scales[blocks].float()[..., None] if kv_scales.dim() == 4 else kv_scales[None, :, :, None, None]
        # [num_pages, 2, num_kv_heads, block_size, head_dim] -> [2, num_heads, num_keys, head_dim]
        num_keys = seq_len - first_page * block_size
        keys_values = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :num_keys]
        key, value = keys_values.repeat_interleave(group, dim=1)
        scores = query[start:end].float().transpose(0, 1) @ key.transpose(1, 2) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores.masked_fill_(~visible(query_len, num_keys, sliding_window, query.device), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, query_len, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :num_keys]
        output[start:end] = (weights @ value).transpose(0, 1).to(output.dtype)
    return output


def visible(query_len: int, seq_len: int, sliding_window: int, device: torch.device) -> Tensor:
    """Returns bool [query_len, seq_len]: the key positions that each query token of one request attends to."""
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    distance = torch.arange(seq_len, device=device)[None, :] - query_pos
    mask = distance <= 0
    if sliding_window > 0:
        mask &= distance > -sliding_window
    return mask


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None) -> None:
    block_size = kv_cache.shape[3]
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    for index, tensor in enumerate((key[kept], value[kept])):
        if kv_cache.dtype is torch.int8:
            assert kv_scales is not None, "an int8 cache has scales"
            tensor, kv_scales[blocks, index, :, offsets] = quantized_rows(tensor, kv_scales.dtype)
        elif kv_scales is not None:
            tensor = (tensor.float() / kv_scales[index, :, None]).clamp(-FP8_MAX, FP8_MAX)
        # As bytes: not every torch build can index-put fp8.
        stored = tensor.to(kv_cache.dtype)
        if kv_cache.dtype.itemsize == 1:
            kv_cache.view(torch.uint8)[blocks, index, :, offsets] = stored.view(torch.uint8)
        else:
            kv_cache[blocks, index, :, offsets] = stored


def quantized_rows(rows: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds [..., size] to integers of 8 bits (in fp32), and returns them with their scales [...]."""
    largest = rows.float().abs().amax(-1)
    scales = (largest / 127.0 + largest * 0).to(scale_dtype)  # NaN where a number is not finite
    steps = scales.float()[..., None]
    return (rows / torch.where(steps > 0, steps, 1.0)).clamp(-127, 127).round().nan_to_num(0.0), scales


def rotary_store_kv(
    positions: Tensor,
    qkv: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    kv_scales: Tensor | None,
) -> None:
    num_kv_heads = kv_cache.shape[2]
    query, key, value = qkv.split((qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        query.copy_(rms_norm(query, q_weight, eps))
        key.copy_(rms_norm(key, k_weight, eps))
    rotary_embedding(positions, query, key, cos_sin_cache)
    store_kv(key, value, kv_cache, slot_mapping, kv_scales)


def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate the first rotary_dim elements of every head in place; element i pairs with i + rotary_dim / 2.

    query, key [num_tokens, num_heads or num_kv_heads, head_dim]; the others as in `rotary_store_kv`.
    """
    cos, sin = cos_sin_cache[positions][:, None, :].chunk(2, dim=-1)
    half = cos.shape[-1]
    for x in (query, key):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()  # views of x when it is fp32
        rotated = (first * cos - second * sin, second * cos + first * sin)
        x[..., :half] = rotated[0].to(x.dtype)
        x[..., half : 2 * half] = rotated[1].to(x.dtype)
