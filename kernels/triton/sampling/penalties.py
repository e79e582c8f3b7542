"""The op apply_penalties on CUDA: two launches over the known tokens of the penalised rows, none over the vocabulary.

The first counts each token in a workspace, the second takes the counts out again: of the programs that meet a token
the one that gets a count that is not zero changes its logit, so every distinct token is changed exactly once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.sampling_parameters import FloatParameter
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

_REPETITION = tl.constexpr(int(FloatParameter.REPETITION_PENALTY))
_PRESENCE = tl.constexpr(int(FloatParameter.PRESENCE_PENALTY))
_FREQUENCY = tl.constexpr(int(FloatParameter.FREQUENCY_PENALTY))
_WARPS = 4
_TILE = 512  # tokens that a program looks at at a time
_SPLITS = 8  # programs per row; each takes every 8th tile, however long the row is


@triton.jit
def count_tokens_kernel(
    rows_ptr,  # int32 [P]
    token_ids_ptr,  # int32 [max_num_seqs, max_model_len]
    num_tokens_ptr,  # int64 [max_num_seqs]
    num_prompt_tokens_ptr,  # int64 [max_num_seqs]
    offsets_ptr,  # int32 [P], drafted tokens that count too; None = none
    counts_ptr,  # int32 [P, vocab_size], zeros: += 2 per occurrence in the output; | 1 if in the prompt
    vocab_size,
    token_ids_stride,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (SPLITS, P)."""
    wait_for_inputs()
    launch_dependents()
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    num_tokens = tl.load(num_tokens_ptr + row).to(tl.int32)
    num_prompt_tokens = tl.load(num_prompt_tokens_ptr + row).to(tl.int32)
    if offsets_ptr is not None:
        num_tokens += tl.load(offsets_ptr + index)
    counts = counts_ptr + index * vocab_size
    for start in range(tl.program_id(0) * TILE, num_tokens, SPLITS * TILE):
        position = start + tl.arange(0, TILE)
        is_known = position < num_tokens
        token = tl.load(token_ids_ptr + row * token_ids_stride + position, mask=is_known, other=0)
        is_output = position >= num_prompt_tokens
        tl.atomic_add(counts + token, 2, mask=is_known & is_output, sem="relaxed")
        tl.atomic_or(counts + token, 1, mask=is_known & (is_output == 0), sem="relaxed")


@triton.jit
def apply_penalties_kernel(
    logits_ptr,  # fp32 [S, vocab_size], changed in place
    batch_indices_ptr,  # int32 [P]
    rows_ptr,  # int32 [P]
    floats_ptr,  # fp32 [len(FloatParameter), max_num_seqs]
    token_ids_ptr,  # int32 [max_num_seqs, max_model_len]
    num_tokens_ptr,  # int64 [max_num_seqs]
    offsets_ptr,  # int32 [P], as above
    counts_ptr,  # int32 [P, vocab_size], zeros again afterwards
    vocab_size,
    logits_stride,
    floats_stride,
    token_ids_stride,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (SPLITS, P)."""
    wait_for_inputs()
    launch_dependents()
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    num_tokens = tl.load(num_tokens_ptr + row).to(tl.int32)
    if offsets_ptr is not None:
        num_tokens += tl.load(offsets_ptr + index)
    repetition = tl.load(floats_ptr + _REPETITION * floats_stride + row)
    presence = tl.load(floats_ptr + _PRESENCE * floats_stride + row)
    frequency = tl.load(floats_ptr + _FREQUENCY * floats_stride + row)
    counts = counts_ptr + index * vocab_size
    logits = logits_ptr + tl.load(batch_indices_ptr + index).to(tl.int64) * logits_stride
    for start in range(tl.program_id(0) * TILE, num_tokens, SPLITS * TILE):
        position = start + tl.arange(0, TILE)
        is_known = position < num_tokens
        token = tl.load(token_ids_ptr + row * token_ids_stride + position, mask=is_known, other=0)
        count = tl.atomic_xchg(counts + token, 0, mask=is_known, sem="relaxed")
        is_first = is_known & (count != 0)
        num_output = (count >> 1).to(tl.float32)
        value = tl.load(logits + token, mask=is_first, other=0.0)
        value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value -= frequency * num_output + tl.where(num_output > 0, presence, 0.0)
        tl.store(logits + token, value, mask=is_first)


def apply_penalties(
    logits: Tensor,
    batch_indices: Tensor,
    rows: Tensor,
    floats: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    offsets: Tensor | None,
) -> None:
    """Computes `reference.apply_penalties`; logits and token_ids have contiguous rows, the columns are contiguous.

    Needs a workspace of 4 bytes per penalised request and vocabulary entry.
    """
    assert logits.dtype == torch.float32, "logits must be fp32"
    assert logits.stride(1) == token_ids.stride(1) == 1, "rows of logits and token_ids must be contiguous"
    assert batch_indices.dtype == rows.dtype == token_ids.dtype == torch.int32, "indices and token_ids must be int32"
    assert num_tokens.dtype == num_prompt_tokens.dtype == torch.int64, "numbers of tokens must be int64"
    assert offsets is None or offsets.dtype == torch.int32, "offsets must be int32"
    assert floats.dtype == torch.float32 and floats.is_contiguous(), "floats must be contiguous fp32"
    num_penalised, vocab_size = len(rows), logits.shape[1]
    if num_penalised == 0:
        return
    counts = torch.zeros((num_penalised, vocab_size), dtype=torch.int32, device=logits.device)
    grid, constants = (_SPLITS, num_penalised), {"TILE": _TILE, "SPLITS": _SPLITS, "num_warps": _WARPS}
    count_tokens_kernel[grid](
        rows,
        token_ids,
        num_tokens,
        num_prompt_tokens,
        offsets,
        counts,
        vocab_size,
        token_ids.stride(0),
        **constants,
        **dependent_launch(logits.device),
    )
    apply_penalties_kernel[grid](
        logits,
        batch_indices,
        rows,
        floats,
        token_ids,
        num_tokens,
        offsets,
        counts,
        vocab_size,
        logits.stride(0),
        floats.stride(0),
        token_ids.stride(0),
        **constants,
        **dependent_launch(logits.device),
    )


_TYPES = {
    "logits_ptr": "*fp32",
    "batch_indices_ptr": "*i32",
    "rows_ptr": "*i32",
    "token_ids_ptr": "*i32",
    "num_tokens_ptr": "*i64",
    "num_prompt_tokens_ptr": "*i64",
    "floats_ptr": "*fp32",
    "offsets_ptr": "*i32",
    "counts_ptr": "*i32",
    "vocab_size": "i32",
    "logits_stride": "i32",
    "floats_stride": "i32",
    "token_ids_stride": "i32",
}


def specialization(kernel: Any, drafts: bool = False) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns (kernel, argument types, constants, num_warps) of one of the two kernels, for ahead-of-time
    compilation."""
    types = {name: _TYPES[name] for name in kernel.arg_names if name in _TYPES}
    constants: dict[str, Any] = {"TILE": _TILE, "SPLITS": _SPLITS}
    if not drafts:
        del types["offsets_ptr"]
        constants["offsets_ptr"] = None
    return kernel, types, constants, _WARPS
