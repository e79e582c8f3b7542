"""From logits to the next token of every sampled request, on the device and without waiting for it.

Only the work that some request of the step asks for is done: a step of greedy requests is one argmax. Order of
operations: log probabilities are of the raw logits; then logit_bias and min_tokens, penalties, temperature, min-p,
top-k, top-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.executor.random_sampling import RandomSampling, sample_random


@dataclass(frozen=True)
class LogitBias:
    """Sparse addends, of logit_bias and (as -inf) of tokens that min_tokens forbids."""

    batch_indices: Tensor  # int64 [N]
    token_ids: Tensor  # int64 [N]
    values: Tensor  # fp32 [N]


@dataclass(frozen=True)
class Penalties:
    """Requests with repetition, presence or frequency penalties."""

    batch_indices: Tensor  # int64 [P]
    rows: Tensor  # int64 [P], index into `token_ids`
    num_prompt_tokens: Tensor  # int64 [P]
    num_tokens: Tensor  # int64 [P]
    max_num_tokens: int
    repetition: Tensor  # fp32 [P], 1 = off
    presence: Tensor  # fp32 [P]
    frequency: Tensor  # fp32 [P]


@dataclass(frozen=True)
class LogprobsSelection:
    """Requests that want log probabilities."""

    batch_indices: Tensor | None  # int64 [L]; None = all of them
    num_top: int  # most alternatives that any of them wants


@dataclass(frozen=True)
class SamplingBatch:
    """How the sampled positions of one step are sampled; batch indices count the sampled positions, 0 .. S - 1."""

    bias: LogitBias | None = None
    penalties: Penalties | None = None
    random: RandomSampling | None = None  # the others are greedy
    logprobs: LogprobsSelection | None = None


@dataclass(frozen=True)
class LogprobsTensors:
    token_ids: Tensor  # int64 [L, 1 + num_top], the chosen token first
    logprobs: Tensor  # fp32 [L, 1 + num_top]
    ranks: Tensor  # int64 [L], of the chosen token, 1 = most probable


@dataclass(frozen=True)
class SampledTokens:
    token_ids: Tensor  # int64 [S]
    logprobs: LogprobsTensors | None


def sample(logits: Tensor, batch: SamplingBatch, token_ids: Tensor) -> SampledTokens:
    """One token per position.

    logits fp32 [S, vocab_size], not changed; token_ids int32 [max_num_seqs, max_model_len], the rows' known tokens,
    which penalties count.
    """
    adjusted = logits
    if batch.bias is not None or batch.penalties is not None:
        adjusted = logits.clone()
        if batch.bias is not None:
            add_bias(adjusted, batch.bias)
        if batch.penalties is not None:
            apply_penalties(adjusted, batch.penalties, token_ids)
    sampled = _choose(adjusted, batch.random)
    if batch.logprobs is None:
        return SampledTokens(sampled, None)
    return SampledTokens(sampled, gather_logprobs(logits, sampled, batch.logprobs))


def _choose(logits: Tensor, random: RandomSampling | None) -> Tensor:
    if random is None:
        return logits.argmax(-1)
    if random.batch_indices is None:
        return sample_random(logits, random)
    sampled = logits.argmax(-1)
    sampled[random.batch_indices] = sample_random(logits[random.batch_indices], random)
    return sampled


def add_bias(logits: Tensor, bias: LogitBias) -> None:
    """In place; ids named twice add up."""
    logits.index_put_((bias.batch_indices, bias.token_ids), bias.values, accumulate=True)


def apply_penalties(logits: Tensor, penalties: Penalties, token_ids: Tensor) -> None:
    """In place. Repetition counts prompt and output; presence and frequency count the output only.

    Occurrences are counted afresh from the rows' token ids, which the device alone knows in full while steps are
    pipelined: no counters have to be kept in step with rows that come, go and resume.
    """
    known = token_ids[penalties.rows, : penalties.max_num_tokens].long()  # [P, max_num_tokens]
    positions = torch.arange(penalties.max_num_tokens, device=logits.device)
    is_known = positions < penalties.num_tokens[:, None]
    is_output = is_known & (positions >= penalties.num_prompt_tokens[:, None])
    # What lies past a row's end is stale: it stands for the row's first token and counts nothing.
    known = torch.where(is_known, known, known[:, :1])
    counts = torch.zeros(len(known), logits.shape[-1], device=logits.device)
    num_output = counts.scatter_add_(1, known, is_output.float()).gather(1, known)  # [P, max_num_tokens]

    # Only known tokens change. One that occurs n times is written n times, with the same value.
    where = (penalties.batch_indices[:, None], known)
    values = logits[where]
    repetition = penalties.repetition[:, None]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= penalties.frequency[:, None] * num_output
    values -= penalties.presence[:, None] * (num_output > 0)
    logits[where] = values


def gather_logprobs(logits: Tensor, sampled: Tensor, selection: LogprobsSelection) -> LogprobsTensors:
    """Log probabilities of the chosen and of the most probable tokens, of the unmodified distribution."""
    if selection.batch_indices is not None:
        logits, sampled = logits[selection.batch_indices], sampled[selection.batch_indices]
    chosen = sampled[:, None]
    chosen_logits = logits.gather(-1, chosen)
    ranks = (logits > chosen_logits).sum(-1) + 1
    top_logits, top_ids = logits.topk(selection.num_top, dim=-1)
    token_ids = torch.cat([chosen, top_ids], dim=-1)
    logprobs = torch.cat([chosen_logits, top_logits], dim=-1) - logits.logsumexp(-1, keepdim=True)
    return LogprobsTensors(token_ids, logprobs, ranks)
