"""Log probabilities of tokens, and the modes of `--logprobs-mode`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.sampling_parameters import processed_logits
from pagewire.services.executor.sampling.row_columns import RowColumns


class LogprobsMode(enum.StrEnum):
    """The values that are returned for a token, by vLLM's names. Raw: of the model's logits. Processed: of the logits
    that the token was sampled from, after sampling parameters and grammars."""

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
    """Requests that want log probabilities of sampled tokens."""

    batch_indices: Tensor | None  # int64 [L]; None = all of them
    num_top: int  # the largest number of alternatives that any of them wants


@dataclass(frozen=True)
class LogprobsTensors:
    token_ids: Tensor  # int64 [L, 1 + num_top], the token itself first
    logprobs: Tensor  # fp32 [L, 1 + num_top]
    ranks: Tensor  # int64 [L], of the token itself, 1 = most probable


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int, mode: LogprobsMode) -> LogprobsTensors:
    """Returns log probabilities of token_ids int64 [L] and of the most probable tokens; logits [L, vocab_size]."""
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
    """Returns log probabilities of sampled int64 [S] for the selected requests.

    logits, adjusted [S, vocab_size]: of the model, and the input of `sample_tokens`. rows int32 [S]
    """
    source = adjusted if mode.is_processed else logits
    if (indices := selection.batch_indices) is not None:
        source, sampled, rows = source[indices], sampled[indices], rows[indices]
    if mode.is_processed:
        indices = rows.long()
        source = processed_logits(source, sampled, columns.floats[:, indices], columns.top_k[indices])
    return token_logprobs(source, sampled, selection.num_top, mode)
