"""Passes over logits by groups of token ids, in C++: each reads its input once, on the kernels' own threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import I, L, P, bind, dtype_code, from_python, threads_for
from pagewire.kernels.fallback.sampling.by_groups import logprobs_by_groups, sample_random
from pagewire.kernels.reference.sampling import GROUP_SIZE
from pagewire.kernels.sampling_parameters import FloatParameter

_LINES = (I, P, L, P, P, L, L)
_group_maxima = bind("group_maxima", *_LINES, P, I)
_group_masses = bind("group_masses", *_LINES, *[P] * 4, I)
_group_counts = bind("group_counts", *_LINES, *[P] * 3, I)
_group_members = bind("group_members", *_LINES, P, P, L, P)
_sample_greedy = bind("sample_greedy", I, P, L, L, L, P, P, P, L, P, I, P, P, I)


class TokenGroups:
    """The groups of `fallback.sampling.by_groups.TokenGroups`, in C++."""

    def __init__(self, logits: Tensor, lines: np.ndarray, scales: np.ndarray) -> None:
        self._logits = logits if logits.stride(1) == 1 else logits.contiguous()
        self._lines, self._scales = np.ascontiguousarray(lines, np.int64), np.ascontiguousarray(scales, np.float32)
        self.maxima = np.empty((len(lines), -(-logits.shape[1] // GROUP_SIZE)), dtype=np.float32)
        _group_maxima(*self._arguments(self._lines, self._scales), self.maxima.ctypes.data, self._threads(len(lines)))

    def masses(self, line: np.ndarray, lowest: np.ndarray, origin: np.ndarray) -> np.ndarray:
        lines, scales, maxima = self._lines[line], self._scales[line], self.maxima[line]
        lowest, origin = np.ascontiguousarray(lowest, np.float32), np.ascontiguousarray(origin, np.float32)
        masses = np.empty_like(maxima)
        _group_masses(
            *self._arguments(lines, scales),
            maxima.ctypes.data,
            lowest.ctypes.data,
            origin.ctypes.data,
            masses.ctypes.data,
            self._threads(len(lines)),
        )
        return masses

    def num_above(self, bound: np.ndarray) -> np.ndarray:
        bound = np.ascontiguousarray(bound, np.float32)
        counts = np.empty(self.maxima.shape, dtype=np.int32)
        _group_counts(
            *self._arguments(self._lines, self._scales),
            self.maxima.ctypes.data,
            bound.ctypes.data,
            counts.ctypes.data,
            self._threads(len(bound)),
        )
        return counts.sum(-1, dtype=np.int64)

    def members(self, line: np.ndarray, group: np.ndarray) -> np.ndarray:
        line, group = np.ascontiguousarray(line, np.int64), np.ascontiguousarray(group, np.int64)
        members = np.empty((len(line), GROUP_SIZE), dtype=np.float32)
        _group_members(
            *self._arguments(self._lines, self._scales),
            line.ctypes.data,
            group.ctypes.data,
            len(line),
            members.ctypes.data,
        )
        return members

    def _arguments(self, lines: np.ndarray, scales: np.ndarray) -> tuple[int, ...]:
        logits = self._logits
        address, stride, vocab_size = logits.data_ptr(), logits.stride(0), logits.shape[1]
        return dtype_code(logits), address, stride, lines.ctypes.data, scales.ctypes.data, len(lines), vocab_size

    def _threads(self, num_lines: int) -> int:
        return threads_for(num_lines * self._logits.shape[1])


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
    """Computes `reference.sample_tokens`. Recorded steps come back to Python for random rows only."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_positions, vocab_size = logits.shape
    sampled = torch.empty(num_positions, dtype=torch.int64)
    maxima = torch.empty(num_positions, -(-vocab_size // GROUP_SIZE), dtype=torch.float32)
    _sample_greedy(
        dtype_code(logits),
        logits.data_ptr(),
        logits.stride(0),
        num_positions,
        vocab_size,
        rows.data_ptr(),
        floats.data_ptr() + FloatParameter.TEMPERATURE * floats.stride(0) * floats.element_size(),
        token_ids.data_ptr(),
        token_ids.stride(0),
        num_tokens.data_ptr(),
        offsets is None,
        maxima.data_ptr(),
        sampled.data_ptr(),
        threads_for(logits.numel()),
    )
    from_python(_sample_random, logits, rows, floats, top_k, seeds, token_ids, num_tokens, offsets, sampled)
    return sampled


def _sample_random(
    logits: Tensor,
    rows: Tensor,
    floats: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    offsets: Tensor | None,
    sampled: Tensor,
) -> None:
    """Samples the rows of sampled int64 [S] that are not greedy: these are below 0, as are rows with NaN."""
    tokens = sampled.numpy()
    if tokens.min(initial=0) < 0:
        sample_random(TokenGroups, logits, rows, floats, top_k, seeds, token_ids, num_tokens, offsets, tokens)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `reference.token_logprobs`."""
    return logprobs_by_groups(TokenGroups, logits, token_ids, num_top)
