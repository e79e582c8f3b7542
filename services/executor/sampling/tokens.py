"""The seam for several ranks: one samples the next tokens, and the others receive them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pagewire.services.executor.sampling.row_columns import RowColumns
from pagewire.services.executor.sampling.sampler import sample_tokens
from pagewire.v1.common_pb2 import SamplingParams


class Tokens(Protocol):
    """A rank's part in sampling the next token of every sampled position."""

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        """Does what `sampler.sample_tokens` does. May be recorded, or captured."""

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters that this rank needs for a request that rank 0 samples with `params`."""

    def announce(self, sampled: Tensor, num_sampled: int) -> None:
        """Sends tokens that `sampler.sample` computed to the ranks that call `sample` in this step.

        sampled int64 [at most num_sampled]; num_sampled: positions that these ranks sample.
        """


class _OwnTokens:
    """Samples for a single rank."""

    def sample(
        self, logits: Tensor, rows: Tensor, columns: RowColumns, token_ids: Tensor, offsets: Tensor | None
    ) -> Tensor:
        return sample_tokens(logits, rows, columns, token_ids, offsets)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        return params

    def announce(self, sampled: Tensor, num_sampled: int) -> None:
        pass


OWN_TOKENS: Tokens = _OwnTokens()
