"""Drafted tokens: found in texts, and accepted or refused once they are checked."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op

# The largest number of drafts of a row in one step.
MAX_DRAFTS = 16


@op(mutates=("token_ids", "num_tokens", "num_computed_tokens", "num_gained"))
def accept_tokens(
    sampled: Tensor,
    rows: Tensor,
    sample_start_loc: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_gained: Tensor,
) -> None:
    """Appends to each row the sampled tokens up to the first wrong draft, inclusive.

    A request with d drafts, which stand behind its last known token, was sampled at d + 1 positions: after that token
    and after each draft. A sampled token counts if all drafts before it are the tokens sampled in their places.

    Read:
    sampled              int64 [S], see `sample_tokens`; NOT_A_NUMBER equals no draft, and is appended as token 0
    rows                 int32 [num_reqs], batch_idx -> row, distinct; -1 = padding
    sample_start_loc     int32 [num_reqs + 1]: request b was sampled at sampled[start[b] : start[b + 1]], or not at all
    Changed:
    token_ids            int32 [max_num_seqs, max_model_len]: drafts at [row, num_tokens[row]:], then what is gained
    num_tokens           int64 [max_num_seqs], += what is gained
    num_computed_tokens  int64 [max_num_seqs], -= drafts that were wrong or followed a wrong one
    Written:
    num_gained           int64 [num_reqs], 1 to d + 1; 0 of padding and of requests that were not sampled

    Example: known [5, 7], drafts [9, 4, 4], sampled [9, 4, 8, 1]: known [5, 7, 9, 4, 8], 3 gained, 1 taken back.
    """


@op(mutates=("token_ids", "num_found"))
def look_up_drafts(
    rows: Tensor,
    num_wanted: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_found: Tensor,
    longest: int,
    shortest: int,
) -> None:
    """Drafts the tokens that followed an earlier occurrence of a row's last tokens: n-grams, or prompt lookup.

    Looks for the last `longest` tokens, or fewer, down to `shortest`; of the places with most tokens in common, the
    latest counts. Drafts that reach the end of the row continue from that place, like a text that repeats itself.
    If there is no place, the last token is repeated.

    Read:
    rows         int32 [R], distinct
    num_wanted   int32 [R], drafts for each, <= MAX_DRAFTS
    num_tokens   int64 [max_num_seqs], >= 1
    Changed:
    token_ids    int32 [max_num_seqs, max_model_len]: drafts at [row, num_tokens[row] : num_tokens[row] + num_wanted]
    Written:
    num_found    int64 [R], drafts worth checking: 2 for each token in common, <= num_wanted; 0 where there is no place

    longest, shortest: 1 <= shortest <= longest

    Example, 3 and 1: known [5, 7, 9, 2, 5, 7], 3 wanted: drafts [9, 2, 5]. Known [7, 5, 7]: [5, 7, 5], 2 of them found.
    """


@op(mutates=("token_ids", "num_found"), cuda=False)
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
    """Drafts the most frequent continuation of a row's last tokens, in the row itself or in other texts.

    Places follow an occurrence of the row's last two tokens, the latest 128 in each text. The places with most tokens
    in common count, up to max_depth; those of other texts only if they have more. Token by token, the draft is the
    most frequent token at these places, the lowest id of equally frequent ones; then only the places with this token
    count, and the draft ends when they are less than min_share of all.

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
