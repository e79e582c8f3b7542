"""The specification: every op in plain torch, written to be read, on any device.

All arithmetic is in fp32 and rounded once to the dtype of the result, except where a comment says otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.reference.sampling import accept_tokens, apply_penalties, sample_tokens, token_logprobs

__all__ = [
    "accept_tokens",
    "add_rms_norm",
    "apply_penalties",
    "gelu_tanh_and_mul",
    "linear",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "rotary_store_kv",
    "sample_tokens",
    "silu_and_mul",
    "step_inputs",
    "store_kv",
    "token_logprobs",
    "visible",
]

# The largest value of float8_e4m3fn; what lies beyond is stored as this.
FP8_MAX = 448.0


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
    split_size: int = 0,
) -> Tensor:
    """Causal attention of a ragged batch over a paged KV cache.

    query            [num_tokens, num_heads, head_dim]
    kv_cache         [num_blocks, 2, num_kv_heads, block_size, head_dim], 0 = key, 1 = value; query's dtype, or
                     float8_e4m3fn with kv_scales
    block_table      int32 [num_reqs, max_blocks]; entries past a request's length are never read
    query_start_loc  int32 [num_reqs + 1]
    seq_lens         int32 [num_reqs], context_len + query_len; 0 = padding
    max_query_len    the longest query of the batch (a launch hint)
    alibi_slopes     fp32 [num_heads]: slope * (key position - query position) is added to the scaled, capped scores
    kv_scales        fp32 [2, num_kv_heads]: what the stored keys and values are multiplied with
    split_size       tokens of context that one program reduces: fixed, the result of a request is bitwise independent
                     of the rest of the batch; 0 = chosen on the device from all lengths (no other effect)
    returns          [num_tokens, num_heads, head_dim]; tokens of no request are undefined

    Query token i of a request stands at position p = seq_len - query_len + i and attends to positions
    max(0, p - sliding_window + 1) .. p (0 .. p without a window). `soft_cap` c > 0 replaces the scaled scores s by
    c * tanh(s / c).
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    output = torch.zeros_like(query)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for b, seq_len in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        if end == start or seq_len == 0:
            continue
        pages = kv_cache[block_table[b, : -(-seq_len // block_size)].long()].float()
        if kv_scales is not None:
            pages *= kv_scales[None, :, :, None, None]
        # [num_pages, 2, num_kv_heads, block_size, head_dim] -> [2, num_heads, seq_len, head_dim]
        keys_values = pages.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :seq_len]
        key, value = keys_values.repeat_interleave(group, dim=1)
        scores = query[start:end].float().transpose(0, 1) @ key.transpose(1, 2) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            scores += alibi_slopes[:, None, None] * _distance(end - start, seq_len, query.device)
        scores.masked_fill_(~visible(end - start, seq_len, sliding_window, query.device), float("-inf"))
        output[start:end] = (scores.softmax(-1) @ value).transpose(0, 1).to(query.dtype)
    return output


def _distance(query_len: int, seq_len: int, device: torch.device) -> Tensor:
    """[query_len, seq_len]: key position - query position."""
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    return torch.arange(seq_len, device=device)[None, :] - query_pos


def visible(query_len: int, seq_len: int, sliding_window: int, device: torch.device) -> Tensor:
    """bool [query_len, seq_len]: the key positions that each query token of one request attends to."""
    distance = _distance(query_len, seq_len, device)
    mask = distance <= 0
    if sliding_window > 0:
        mask &= distance > -sliding_window
    return mask


def store_kv(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] to their slots; slot -1 = padding, skipped.

    With kv_scales [2, num_kv_heads] they are divided by their scale and saturate at +-448 (float8_e4m3fn).
    """
    block_size = kv_cache.shape[3]
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    for index, tensor in enumerate((key[kept], value[kept])):
        if kv_scales is not None:
            tensor = (tensor.float() / kv_scales[index, :, None]).clamp(-FP8_MAX, FP8_MAX)
        # As bytes: not every torch build can index-put fp8.
        stored = tensor.to(kv_cache.dtype)
        if kv_cache.dtype.itemsize == 1:
            kv_cache.view(torch.uint8)[blocks, index, :, offsets] = stored.view(torch.uint8)
        else:
            kv_cache[blocks, index, :, offsets] = stored


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
    """Normalise query and key per head (with weights), rotate both, store key and value in the cache.

    positions     int64 [num_tokens]
    qkv           [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; the query heads are changed in place, what the
                  key heads hold afterwards is undefined
    cos_sin_cache fp32 [max_position, rotary_dim] = cat(cos, sin)
    kv_cache, slot_mapping, kv_scales as in `store_kv`
    q_weight, k_weight  [head_dim], both or none: `rms_norm` with eps comes first
    """
    num_kv_heads = kv_cache.shape[2]
    query, key, value = qkv.split((qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        query.copy_(rms_norm(query, q_weight, eps))
        key.copy_(rms_norm(key, k_weight, eps))
    rotary_embedding(positions, query, key, cos_sin_cache)
    store_kv(key, value, kv_cache, slot_mapping, kv_scales)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x²) + eps) * weight over the last dimension.

    The normalised value is rounded to x's dtype before the weight multiplies it, as in transformers' LlamaRMSNorm.
    """
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; returns rms_norm(residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


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


def silu_and_mul(x: Tensor) -> Tensor:
    """x [num_tokens, 2 * size] -> silu(x[:, :size]) * x[:, size:]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """x [num_tokens, 2 * size] -> gelu(x[:, :size], tanh approximation) * x[:, size:]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [num_tokens, in_features] @ weight [out_features, in_features].T + bias."""
    return F.linear(x, weight, bias)


def step_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    num_blocks: Tensor,
    new_block_start_loc: Tensor,
    new_block_ids: Tensor,
    token_ids: Tensor,
    num_computed_tokens: Tensor,
    row_block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
) -> None:
    """Everything that a forward pass needs to know of its requests, from their rows; and their rows move on.

    Read:
    rows                 int32 [num_reqs], batch_idx -> row, distinct; -1 = padding
    query_start_loc      int32 [num_reqs + 1]; a padding request has tokens too
    num_blocks           int32 [num_reqs], how many blocks the row's table has before this step's are appended
    new_block_start_loc  int32 [num_reqs + 1]: request b gets new_block_ids[start[b] : start[b + 1]]
    new_block_ids        int32 [>= new_block_start_loc[-1]]
    token_ids            int32 [max_num_seqs, max_model_len]
    Changed:
    num_computed_tokens  int64 [max_num_seqs], += the query's length
    row_block_table      int32 [max_num_seqs, max_blocks], new blocks appended
    Written:
    input_ids, positions, slot_mapping   int64 [num_tokens]; padding: 0, 0, -1
    seq_lens             int32 [num_reqs]; padding: 0
    block_table          int32 [num_reqs, max_blocks], the row's table as far as seq_len reaches, the rest untouched
    """
    starts, new_starts = query_start_loc.tolist(), new_block_start_loc.tolist()
    for b, row in enumerate(rows.tolist()):
        tokens = slice(starts[b], starts[b + 1])
        if row < 0:
            input_ids[tokens], positions[tokens], slot_mapping[tokens], seq_lens[b] = 0, 0, -1, 0
            continue
        new_ids = new_block_ids[new_starts[b] : new_starts[b + 1]]
        first_new = int(num_blocks[b])
        row_block_table[row, first_new : first_new + len(new_ids)] = new_ids
        context_len = int(num_computed_tokens[row])
        seq_len = context_len + tokens.stop - tokens.start
        span = torch.arange(context_len, seq_len, device=rows.device)
        input_ids[tokens] = token_ids[row, span].long()
        positions[tokens] = span
        slot_mapping[tokens] = row_block_table[row, span // block_size].long() * block_size + span % block_size
        seq_lens[b] = seq_len
        num_pages = -(-seq_len // block_size)
        block_table[b, :num_pages] = row_block_table[row, :num_pages]
        num_computed_tokens[row] = seq_len
