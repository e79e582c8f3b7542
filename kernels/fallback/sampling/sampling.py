"""The sampling ops in torch and numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.fallback.sampling.by_groups import logprobs_by_groups, sample_by_groups
from pagewire.kernels.reference.sampling import GROUP_SIZE
from pagewire.kernels.sampling_parameters import FloatParameter


class TokenGroups:
    """The groups of `by_groups.TokenGroups`, in torch."""

    def __init__(self, logits: Tensor, lines: np.ndarray, scales: np.ndarray) -> None:
        if len(lines) < len(logits):
            logits = logits[torch.from_numpy(lines)]
        scaled = logits * torch.from_numpy(scales)[:, None]  # fp32 for logits of any dtype
        padded = F.pad(scaled, (0, -logits.shape[1] % GROUP_SIZE), value=float("-inf"))
        groups = padded.unflatten(1, (-1, GROUP_SIZE))
        self._groups, self.maxima = groups.numpy(), groups.amax(-1).numpy()

    def masses(self, line: np.ndarray, lowest: np.ndarray, origin: np.ndarray) -> np.ndarray:
        maxima = self.maxima[line]
        index, group = (maxima >= lowest[:, None]).nonzero()
        values = torch.from_numpy(self.members(line[index], group))
        exponents = values - torch.from_numpy(origin[index, None])
        exponents.masked_fill_(values < torch.from_numpy(lowest[index, None]), -np.inf)
        masses = np.zeros_like(maxima)
        # exp() is several times slower for -inf and for underflow; e^-80 is too small to be drawn or to count.
        masses[index, group] = exponents.clamp_(min=-80).exp_().sum(-1).numpy()
        return masses

    def num_above(self, bound: np.ndarray) -> np.ndarray:
        line, group = (self.maxima > bound[:, None]).nonzero()
        counts = (self.members(line, group) > bound[line, None]).sum(-1)
        return np.bincount(line, counts, minlength=len(bound)).astype(np.int64)

    def members(self, line: np.ndarray, group: np.ndarray) -> np.ndarray:
        return self._groups[line, group]


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
    """Computes `reference.sample_tokens`."""
    return sample_by_groups(TokenGroups, logits, rows, floats, top_k, seeds, token_ids, num_tokens, offsets)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `reference.token_logprobs`."""
    return logprobs_by_groups(TokenGroups, logits, token_ids, num_top)


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
    """Computes `reference.apply_penalties`."""
    every, tokens, parameters = logits.numpy(), token_ids.numpy(), floats.numpy()
    repetition = parameters[FloatParameter.REPETITION_PENALTY]
    presence, frequency = parameters[FloatParameter.PRESENCE_PENALTY], parameters[FloatParameter.FREQUENCY_PENALTY]
    drafted = [0] * len(rows) if offsets is None else offsets.tolist()
    for index, row, offset in zip(batch_indices.tolist(), rows.tolist(), drafted, strict=True):
        known = tokens[row, : int(num_tokens[row]) + offset]
        output = known[int(num_prompt_tokens[row]) :]
        num_output = np.bincount(output, minlength=logits.shape[1])[known].astype(np.float32)
        # Only known tokens change. One that occurs n times is written n times, with the same value.
        values = every[index, known]
        values = np.where(values > 0, values / repetition[row], values * repetition[row])
        values -= frequency[row] * num_output + presence[row] * (num_output > 0)
        every[index, known] = values
