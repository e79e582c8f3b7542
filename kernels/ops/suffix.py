"""Drafts by suffix decoding."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op

__all__ = ["draft_by_suffix"]


@op(cuda=None, mutates=("token_ids", "num_found"))
def draft_by_suffix(
    rows: Tensor,
    num_wanted: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    others: Tensor,
    num_found: Tensor,
    max_depth: int,
    factor: float,
    min_share: float,
) -> None:
    """Drafts what most often followed a row's last tokens, in the row itself or in other texts.

    Places are those behind the row's last two tokens, the latest 128 of each text; those with most tokens in common
    count, up to max_depth, and those of the other texts only if they have more. Token by token, the draft is what
    follows at most of them, the lowest id of equally frequent ones; then only places count that go on like this, and
    the draft ends where they are less than min_share of all.

    Read:
    rows         int32 [R], distinct
    num_wanted   int32 [R], drafts for each, <= MAX_DRAFTS; no more than factor for each token in common, but one
    num_tokens   int64 [max_num_seqs], >= 1
    others       int32 [N], texts with -1 behind each
    Changed:
    token_ids    int32 [max_num_seqs, max_model_len]: drafts at [row, num_tokens[row] : num_tokens[row] + num_found]
    Written:
    num_found    int64 [R], drafts

    max_depth >= 2. factor, min_share: rounded to fp32, like their products with whole numbers.
    """
