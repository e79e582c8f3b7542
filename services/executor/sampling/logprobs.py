"""Log probabilities of tokens, and what `--logprobs-mode` makes of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.sampling.row_columns import RowColumns


class LogprobsMode(enum.StrEnum):
    """What is told of a token, by vLLM's names. Raw: as the model gives it. Processed: as the token was drawn from,
    with everything that sampling parameters and grammars change."""

    RAW_LOGPROBS = "raw_logprobs"
    PROCESSED_LOGPROBS = "processed_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def is_processed(self) -> bool:
        return self in (LogprobsMode.PROCESSED_LOGPROBS, LogprobsMode.PROCESSED_LOGITS)

    @property
    def is_logits(self) -> bool:
        return self in (LogprobsMode.RAW_LOGITS, LogprobsMode.PROCESSED_LOGITS)


@dataclass(frozen=True)
class LogprobsSelection:
    """Requests that want log probabilities of what is sampled."""

    batch_indices: Tensor | None  # int64 [L]; None = all of them
    num_top: int  # most alternatives that any of them wants


@dataclass(frozen=True)
class LogprobsTensors:
    token_ids: Tensor  # int64 [L, 1 + num_top], the token itself first
    logprobs: Tensor  # fp32 [L, 1 + num_top]
    ranks: Tensor  # int64 [L], of the token itself, 1 = most probable


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, mode: LogprobsMode) -> LogprobsTensors:
    """Of the tokens token_ids int64 [L] and of the most probable ones; logits [L, vocab_size]."""
    ids, logprobs, ranks = ops.token_logprobs(logits, token_ids, num_top)
    return LogprobsTensors(ids, logits.gather(-1, ids).float() if mode.is_logits else logprobs, ranks)


def sampled_logprobs(
    logits: Tensor,
    adjusted: Tensor,
    sampled: Tensor,
    rows: Tensor,
    columns: RowColumns,
    selection: LogprobsSelection,
    mode: LogprobsMode,
) -> LogprobsTensors:
    """Of what was sampled, int64 [S], for those who asked.

    logits, adjusted [S, vocab_size]: of the model, and what `sample_tokens` got. rows int32 [S]
    """
    source = adjusted if mode.is_processed else logits
    if (indices := selection.batch_indices) is not None:
        source, sampled, rows = source[indices], sampled[indices], rows[indices]
    if mode.is_processed:
        source = drawn_from(source, sampled, rows, columns)
    return token_logprobs(source, sampled, selection.num_top, mode)


def drawn_from(logits: Tensor, sampled: Tensor, rows: Tensor, columns: RowColumns) -> Tensor:
    """What `ops.sample_tokens` draws from: fp32 [L, vocab_size], divided by the temperature, -inf for tokens that
    min-p, top-k and top-p leave out. Greedy rows stay as they are.

    sampled int64 [L] are never left out, although the sums that top-p compares are rounded in another order here.
    """
    indices = rows.long()
    temperature, top_p = columns.temperature[indices][:, None], columns.top_p[indices][:, None]
    is_random = temperature > 0
    scaled = logits.float() * torch.where(is_random, temperature, 1.0).reciprocal()
    falling = scaled.sort(dim=-1, descending=True).values
    least = falling.gather(1, columns.top_k[indices][:, None] - 1)
    least = torch.maximum(least, falling[:, :1] + columns.min_p[indices][:, None].log())
    probs = falling.masked_fill(falling < least, float("-inf")).softmax(-1)
    nucleus_size = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True)
    nucleus = falling.gather(1, nucleus_size.clamp(min=1) - 1)
    least = torch.where(top_p < 1, torch.maximum(least, nucleus), least)
    least = torch.minimum(least, scaled.gather(1, sampled[:, None]))
    return scaled.masked_fill(is_random & (scaled < least), float("-inf"))
