"""The choice of the next token. Columns of rows are [max_num_seqs], token_ids [max_num_seqs, max_model_len]."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.ops.definition import op

# Most drafts of a row in one step.
MAX_DRAFTS = 16
NOT_A_NUMBER = -1  # in place of a token: the logits have NaN


@op(cuda="sampling.sampling", mutates=("token_ids", "num_tokens"))
def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    offsets: Tensor | None,
) -> Tensor:
    """Chooses a token per position and appends it to its row.

    logits       fp32, bf16 or fp16 [S, vocab_size]; computed with in fp32
    rows         int32 [S], index into everything below, distinct; -1 = padding: result undefined, nothing written
    temperature  fp32 [max_num_seqs], 0 = the most probable token (of equals the one with the lowest id)
    top_k        int64 [max_num_seqs], vocab_size = off
    top_p        fp32 [max_num_seqs], 1 = off
    min_p        fp32 [max_num_seqs], 0 = off
    seeds        int64 [max_num_seqs]
    token_ids    int32 [max_num_seqs, max_model_len]: the token is written to [row, num_tokens[row]]
    num_tokens   int64 [max_num_seqs]: += 1
    offsets      int32 [S]: how many drafted tokens lie between the row's last known one and the position. With them a
                 row may have several positions, and nothing is appended: `accept_tokens` does it.
    returns      int64 [S]; NOT_A_NUMBER where there is NaN among the logits, and the row gets token 0

    min-p: tokens at least min_p times as probable as the most probable one stay. top-k: those at least as probable as
    the k-th most probable one. top-p: of what these leave, the smallest set of most probable tokens with mass >= top_p.
    Tokens of equal probability stay or go together.

    A row with inf, or with nothing but -inf, yields some id of the vocabulary.
    """
    return logits.new_empty(logits.shape[:1], dtype=torch.int64)


@op(cuda="sampling.drafts", mutates=("token_ids", "num_tokens", "num_computed_tokens", "num_gained"))
def accept_tokens(
    sampled: Tensor,
    rows: Tensor,
    sample_start_loc: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_gained: Tensor,
) -> None:
    """Appends to each row the sampled tokens as far as its drafts were right, and the one after them.

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


@op(cuda="sampling.lookup", mutates=("token_ids", "num_found"))
def look_up_drafts(
    rows: Tensor,
    num_wanted: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_found: Tensor,
    longest: int,
    shortest: int,
) -> None:
    """Drafts what followed a row's last tokens where it had them before: n-grams, or prompt lookup.

    Looks for the last `longest` tokens, or fewer, but no fewer than `shortest`; of the places with most tokens in
    common, the latest counts. What runs into the end of the row goes on from that place, as a text that repeats itself
    does. Where there is none, the last token is repeated.

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


@op(cuda="sampling.penalties", mutates=("logits",))
def apply_penalties(
    logits: Tensor,
    batch_indices: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    offsets: Tensor | None,
) -> None:
    """Lowers, in place, the logits of tokens that a request has seen.

    logits         fp32 [S, vocab_size]
    batch_indices  int32 [P], which of the S positions have penalties
    rows           int32 [P], their rows: index into everything below
    token_ids      int32 [max_num_seqs, max_model_len]; num_tokens, num_prompt_tokens  int64 [max_num_seqs]
    repetition     fp32 [max_num_seqs], 1 = off: for prompt and output; positive logits are divided, others multiplied
    presence, frequency  fp32 [max_num_seqs], 0 = off: count the output only; subtracted once, and per occurrence
    offsets        int32 [P]: how many drafted tokens behind the known ones count too; without: none

    Occurrences are counted afresh from the rows' tokens: no counters have to be kept in step with rows that come, go
    and resume.
    """


@op(cuda="sampling.token_masks", mutates=("logits",))
def mask_tokens(logits: Tensor, batch_indices: Tensor, masks: Tensor) -> None:
    """Sets, in place, the logits of tokens to -inf that may not be chosen.

    logits         fp32 [S, vocab_size], contiguous rows
    batch_indices  int32 [n], which of the S positions have a mask
    masks          int32 [n, ceil(vocab_size / 32)]: token t may be chosen if bit t % 32 of word t // 32 is set
    """


@op(cuda="sampling.logprobs")
def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of chosen tokens and of the most probable ones.

    logits     fp32, bf16 or fp16 [L, vocab_size]
    token_ids  int64 [L], the chosen ones
    num_top    0 <= num_top <= vocab_size
    returns    (token ids int64 [L, 1 + num_top], the chosen token first, then the most probable, of equals the lowest
               id first; their log probabilities fp32 [L, 1 + num_top]; the chosen token's rank int64 [L], 1 = most
               probable)
    """
    columns = (logits.shape[0], 1 + num_top)
    return (
        token_ids.new_empty(columns),
        logits.new_empty(columns, dtype=torch.float32),
        token_ids.new_empty(token_ids.shape),
    )
