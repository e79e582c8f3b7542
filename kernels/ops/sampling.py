"""The choice of the next token. Columns of rows are [max_num_seqs], token_ids [max_num_seqs, max_model_len].

floats is the matrix of `kernels.sampling_parameters`, fp32 [len(FloatParameter), max_num_seqs].
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.ops.definition import op

NOT_A_NUMBER = -1  # in place of a token: the logits have NaN


@op(mutates=("token_ids", "num_tokens"))
def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    floats: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    offsets: Tensor | None,
) -> Tensor:
    """Chooses a token per position and appends it to its row.

    logits       fp32, bf16 or fp16 [S, vocab_size]; computed with in fp32
    rows         int32 [S], index into everything below, distinct; -1 = padding: result undefined, nothing written
    floats       see above; a temperature of 0 chooses the most probable token (of equals the one with the lowest id)
    top_k        int64 [max_num_seqs], vocab_size = off
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


@op(mutates=("logits",))
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
    """Lowers, in place, the logits of tokens that a request has seen.

    logits         fp32 [S, vocab_size]
    batch_indices  int32 [P], which of the S positions have penalties
    rows           int32 [P], their rows: index into everything below
    floats         see above. Repetition is for prompt and output: it divides positive logits, and multiplies others.
                   Presence and frequency count the output only: they are subtracted once, and per occurrence.
    token_ids      int32 [max_num_seqs, max_model_len]; num_tokens, num_prompt_tokens  int64 [max_num_seqs]
    offsets        int32 [P]: how many drafted tokens behind the known ones count too; without: none

    Occurrences are counted anew from the rows' tokens, so no counters must be updated when rows come, go and resume.
    """


@op(mutates=("logits",))
def mask_tokens(logits: Tensor, batch_indices: Tensor, masks: Tensor) -> None:
    """Sets, in place, the logits of tokens to -inf that may not be chosen.

    logits         fp32 [S, vocab_size], contiguous rows
    batch_indices  int32 [n], which of the S positions have a mask
    masks          int32 [n, ceil(vocab_size / 32)]: token t may be chosen if bit t % 32 of word t // 32 is set
    """


@op()
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
