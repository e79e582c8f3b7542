"""The sampler: from logits to the next token of every sampled request, without waiting for the device.

Order of operations: logit_bias and min_tokens, bad_words, penalties, grammars and allowed_token_ids, temperature, min-p
and top-k, top-p. Log probabilities are of the logits before all these, unless set otherwise by `--logprobs-mode`. From
temperature on, `sample_tokens` does everything, for any mix of requests. The earlier operations are extras, done only
in steps where a request asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.sampling.logprobs import (
    LogprobsMode,
    LogprobsSelection,
    LogprobsTensors,
    sampled_logprobs,
)
from pagewire.services.executor.sampling.row_columns import RowColumns

# Finite: if all allowed tokens are also forbidden, one of them is sampled.
_FORBIDDEN = -1e30


@dataclass(frozen=True)
class LogitBias:
    """Sparse addends, of logit_bias and (as -inf) of tokens that min_tokens forbids."""

    batch_indices: Tensor  # int64 [N]
    token_ids: Tensor  # int64 [N]
    values: Tensor  # fp32 [N]
    min_lens: Tensor | None = None  # int64 [N]: applies only while a sequence is shorter; None = decided by the host


@dataclass(frozen=True)
class BadWords:
    """Sequences of tokens that must not be completed; N of them, of up to P + 1 tokens."""

    batch_indices: Tensor  # int64 [N]
    prefixes: Tensor  # int64 [N, P], all but the last token, right-aligned; -1 before them
    last_token_ids: Tensor  # int64 [N]


@dataclass(frozen=True)
class Penalties:
    """Requests with repetition, presence or frequency penalties."""

    batch_indices: Tensor  # int32 [P]
    rows: Tensor  # int32 [P]
    offsets: Tensor | None = None  # int32 [P], drafted tokens that count as known; None = none


@dataclass(frozen=True)
class Masks:
    """Requests with a grammar or allowed_token_ids, and the tokens that may follow."""

    batch_indices: Tensor  # int32 [n]
    masks: Tensor  # int32 [n, ceil(vocab_size / 32)], see `ops.mask_tokens`


@dataclass(frozen=True)
class SamplingExtras:
    """The extras of a step; batch indices count the sampled positions, 0 .. S - 1."""

    bias: LogitBias | None = None
    penalties: Penalties | None = None
    logprobs: LogprobsSelection | None = None
    masks: Masks | None = None
    bad_words: BadWords | None = None

    @property
    def changes_logits(self) -> bool:
        return any(extra is not None for extra in (self.bias, self.penalties, self.masks, self.bad_words))


@dataclass(frozen=True)
class SampledTokens:
    token_ids: Tensor  # int64 [S]; ops.NOT_A_NUMBER where the logits have NaN
    logprobs: LogprobsTensors | None

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by the names of `HostTokens`."""
        tensors = {"token_ids": self.token_ids}
        if self.logprobs is not None:
            tensors["logprob_token_ids"] = self.logprobs.token_ids
            tensors["logprobs"] = self.logprobs.logprobs
            tensors["ranks"] = self.logprobs.ranks
        return tensors


def sample(
    logits: Tensor,
    rows: Tensor,
    columns: RowColumns,
    token_ids: Tensor,
    extras: SamplingExtras,
    offsets: Tensor | None = None,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> SampledTokens:
    """One token per position, appended to its row unless there are offsets.

    logits [S, vocab_size], not changed; rows int32 [S]; token_ids int32 [max_num_seqs, max_model_len]; offsets int32
    [S], drafted tokens before each position.
    """
    adjusted = logits
    if extras.changes_logits:
        adjusted = logits.to(torch.float32, copy=True)
    if extras.bias is not None:
        add_bias(adjusted, extras.bias, rows, columns, offsets)
    if extras.bad_words is not None:
        forbid_words(adjusted, extras.bad_words, rows, columns, token_ids, offsets)
    if extras.penalties is not None:
        apply_penalties(adjusted, extras.penalties, columns, token_ids)
    if extras.masks is not None:
        ops.mask_tokens(adjusted, extras.masks.batch_indices, extras.masks.masks)
    sampled = sample_tokens(adjusted, rows, columns, token_ids, offsets)
    if extras.logprobs is None:
        return SampledTokens(sampled, None)
    named = sampled.clamp(min=0)  # NOT_A_NUMBER is not a valid index
    logprobs = sampled_logprobs(logits, adjusted, named, rows, columns, extras.logprobs, logprobs_mode)
    return SampledTokens(sampled, logprobs)


def sample_tokens(
    logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None = None
) -> Tensor:
    """Token ids int64 [S] by temperature, top-k, top-p and min-p of each row; appended unless there are offsets."""
    return ops.sample_tokens(
        logits, rows, columns.floats, columns.top_k, columns.seed, token_ids, columns.num_tokens, offsets
    )


def add_bias(logits: Tensor, bias: LogitBias, rows: Tensor, columns: RowColumns, offsets: Tensor | None) -> None:
    """Adds biases in place, to fp32 logits [S, vocab_size]."""
    values = bias.values
    if bias.min_lens is not None:
        lens = columns.num_tokens.index_select(0, rows)
        if offsets is not None:
            lens += offsets
        values = values.where(lens[bias.batch_indices] < bias.min_lens, 0.0)
    # Ids named twice add up.
    logits.index_put_((bias.batch_indices, bias.token_ids), values, accumulate=True)


def forbid_words(
    logits: Tensor, words: BadWords, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
) -> None:
    """Forbids words in place, in fp32 logits [S, vocab_size]. The device decides: the host does not know the last
    tokens yet."""
    of_words = rows.long()[words.batch_indices]  # [N]
    ends = columns.num_tokens[of_words]
    if offsets is not None:
        ends = ends + offsets[words.batch_indices]
    length = words.prefixes.shape[1]
    positions = ends[:, None] - length + torch.arange(length, device=logits.device)  # [N, P]
    known = token_ids[of_words[:, None], positions.clamp(min=0)]
    is_output = positions >= columns.num_prompt_tokens[of_words][:, None]
    is_next = ((known == words.prefixes) & is_output | (words.prefixes < 0)).all(1)
    values = torch.zeros_like(is_next, dtype=torch.float32).masked_fill(is_next, _FORBIDDEN)
    logits.index_put_((words.batch_indices, words.last_token_ids), values, accumulate=True)


def apply_penalties(logits: Tensor, penalties: Penalties, columns: RowColumns, token_ids: Tensor) -> None:
    """Applies penalties in place, to fp32 logits [S, vocab_size]."""
    ops.apply_penalties(
        logits,
        penalties.batch_indices,
        penalties.rows,
        columns.floats,
        token_ids,
        columns.num_tokens,
        columns.num_prompt_tokens,
        penalties.offsets,
    )
