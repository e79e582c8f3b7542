"""The seam for several ranks: one samples the next tokens, and the others receive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pagewire.services.executor.sampling.row_columns import RowColumns
from pagewire.services.executor.sampling.sampler import SampledTokens, sample_tokens
from pagewire.v1.common_pb2 import SamplingParams


class Tokens(Protocol):
    """A rank's part in sampling the next token of every sampled position.

    `sample` is for positions without extras; `draw`, then `share`, for any: only the leader knows of extras, so what
    all ranks do together is in `share` alone.
    """

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        """Does what `sampler.sample_tokens` does. May be recorded, or captured."""

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters that this rank needs for a request that rank 0 samples with `params`."""

    def draw(self, sampled: Callable[[], SampledTokens]) -> SampledTokens:
        """Returns what the function samples, unless another rank does; then nothing."""

    def share(self, rows: Tensor, columns: RowColumns, token_ids: Tensor, *, appends: bool) -> Tensor:
        """Returns the tokens, int64 [len(rows)], that the leader drew last, on all ranks. rows: with those of padding.
        appends: whether the other ranks append them to their rows, as the leader did. May be recorded, or captured."""


class _OwnTokens:
    """Samples for a single rank."""

    sample = staticmethod(sample_tokens)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        return params

    def draw(self, sampled: Callable[[], SampledTokens]) -> SampledTokens:
        return sampled()

    def share(self, rows: Tensor, columns: RowColumns, token_ids: Tensor, *, appends: bool) -> Tensor:
        raise AssertionError("there is no other rank")


OWN_TOKENS: Tokens = _OwnTokens()
