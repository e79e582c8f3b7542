"""Pooling: the hidden states of a request's tokens become one vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.device.upload import upload


@dataclass(frozen=True)
class Spans:
    """The positions of the tokens of a step's requests, and the V requests that are pooled."""

    lengths: Tensor  # int64 [num_reqs], >= 1; tokens follow each other in the order of requests
    chosen: Tensor  # int64 [V], indices of requests
    first: Tensor  # int64 [V], index of each one's first token in the step
    last: Tensor  # int64 [V]
    num_tokens: int

    @classmethod
    def of(cls, lengths: np.ndarray, chosen: np.ndarray, device: torch.device) -> Spans:
        ends = lengths.cumsum()
        columns = {
            "lengths": lengths,
            "chosen": chosen,
            "first": (ends - lengths)[chosen],
            "last": ends[chosen] - 1,
        }
        return cls(**upload(device, columns), num_tokens=int(ends[-1]))


class Pooler(Protocol):
    def __call__(self, hidden: Tensor, spans: Spans) -> Tensor:
        """hidden [num_tokens, hidden_size] of a step -> fp32 [V, size]"""


Pool = Callable[[Tensor, Spans], Tensor]  # like a Pooler; size is hidden_size


def first_token(hidden: Tensor, spans: Spans) -> Tensor:
    return hidden.index_select(0, spans.first).float()


def last_token(hidden: Tensor, spans: Spans) -> Tensor:
    return hidden.index_select(0, spans.last).float()


def mean(hidden: Tensor, spans: Spans) -> Tensor:
    return _reduced(hidden, spans, "mean")


def maximum(hidden: Tensor, spans: Spans) -> Tensor:
    return _reduced(hidden, spans, "max")


def mean_sqrt_len(hidden: Tensor, spans: Spans) -> Tensor:
    """The sum divided by the root of the length."""
    lengths = spans.lengths.index_select(0, spans.chosen)
    return mean(hidden, spans) * lengths.float().sqrt()[:, None]


def weighted_mean(hidden: Tensor, spans: Spans) -> Tensor:
    """Token i, from 1, has the weight i."""
    starts = spans.lengths.cumsum(0) - spans.lengths
    place = torch.arange(1, spans.num_tokens + 1, device=hidden.device)
    place -= starts.repeat_interleave(spans.lengths, output_size=spans.num_tokens)
    lengths = spans.lengths.index_select(0, spans.chosen)
    return _reduced(hidden.float() * place[:, None], spans, "sum") / (lengths * (lengths + 1) / 2)[:, None]


def _reduced(hidden: Tensor, spans: Spans, how: str) -> Tensor:
    # unsafe: avoids a check of the lengths' sum, which would wait for the device.
    whole = torch.segment_reduce(hidden.float(), how, lengths=spans.lengths, unsafe=True)
    return whole.index_select(0, spans.chosen)
