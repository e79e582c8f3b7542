"""The seam for several ranks: one samples the next tokens, and the others receive them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pagewire.services.executor.sampling.logprobs import LogprobsMode
from pagewire.services.executor.sampling.row_columns import RowColumns
from pagewire.services.executor.sampling.sampler import SampledTokens, SamplingExtras, sample, sample_tokens
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

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        columns: RowColumns,
        token_ids: Tensor,
        extras: SamplingExtras | None,
        offsets: Tensor | None,
        mode: LogprobsMode,
    ) -> SampledTokens:
        """Does what `sampler.sample` does; where another rank samples, nothing."""

    def share(self, rows: Tensor, columns: RowColumns, token_ids: Tensor, *, appends: bool) -> Tensor:
        """Returns the tokens, int64 [len(rows)], that the leader drew last, on all ranks. rows: with those of padding.
        appends: whether the other ranks append them to their rows, as the leader did. May be recorded, or captured."""


class _OwnTokens:
    """Samples for a single rank."""

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        return sample_tokens(logits, rows, columns, token_ids, offsets)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        return params

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        columns: RowColumns,
        token_ids: Tensor,
        extras: SamplingExtras | None,
        offsets: Tensor | None,
        mode: LogprobsMode,
    ) -> SampledTokens:
        return sample(logits, rows, columns, token_ids, extras or SamplingExtras(), offsets, mode)

    def share(self, rows: Tensor, columns: RowColumns, token_ids: Tensor, *, appends: bool) -> Tensor:
        raise AssertionError("there is no other rank")


OWN_TOKENS: Tokens = _OwnTokens()
