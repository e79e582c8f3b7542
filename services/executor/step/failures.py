"""Requests that fail in a step while its other requests continue: the causes, for clients and for metrics."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagewire.kernels.ops import NOT_A_NUMBER


class Cause(enum.StrEnum):
    """The cause of a failure, by its name in metrics."""

    IMAGE = "image"
    PROMPT = "prompt"
    GRAMMAR = "grammar"
    ADAPTER = "adapter"
    NAN = "nan"
    ILLEGAL_TOKEN = "illegal_token"

    @property
    def is_clients_fault(self) -> bool:
        return self in (Cause.IMAGE, Cause.PROMPT, Cause.GRAMMAR)


@dataclass(frozen=True)
class Failure:
    cause: Cause
    message: str  # for the client


def find_failures(
    request_ids: Sequence[int],
    num_tokens: np.ndarray,
    token_ids: np.ndarray,
    vectors: np.ndarray | None,
    vocab_size: int,
) -> dict[int, Failure]:
    """Returns failures by request: sampled ids outside the vocabulary, and vectors that are not finite.

    request_ids [R + V]: sampled requests, then requests that yield a vector. num_tokens [R]: gained tokens of each;
    token_ids int64 [sum(num_tokens)]; vectors fp32 [V, size].
    """
    failures: dict[int, Failure] = {}
    # Read as unsigned, negative ids exceed all others: one pass, and a second one only if there are wrong ids.
    if len(token_ids) and int(token_ids.view(np.uint64).max()) >= vocab_size:
        owners = np.repeat(np.arange(len(num_tokens)), num_tokens)
        for index in np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size)).tolist():
            failure = _of_token(int(token_ids[index]), vocab_size)
            failures.setdefault(request_ids[owners[index]], failure)
    if vectors is not None and not (is_finite := np.isfinite(vectors).all(1)).all():
        for index in np.flatnonzero(~is_finite).tolist():
            message = "the model yields NaN for this request: there is no vector"
            failures[request_ids[len(num_tokens) + index]] = Failure(Cause.NAN, message)
    return failures


def _of_token(token_id: int, vocab_size: int) -> Failure:
    if token_id == NOT_A_NUMBER:
        return Failure(Cause.NAN, "the model yields NaN for this request: there is no next token")
    message = f"the token {token_id} that was sampled for this request is outside the vocabulary of {vocab_size}"
    return Failure(Cause.ILLEGAL_TOKEN, message)
