"""Proposers draft tokens: a step then checks several of a request's next tokens at once and keeps the right ones."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pagewire.services.executor.request_state import RequestState


class Proposer(Protocol):
    """Drafts on the device, before the step that checks them, without waiting for the device.

    What it drafts changes how many tokens a step gains, never which: a draft counts if it is the token that would have
    been sampled in its place.
    """

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a request in one step; >= 1."""

    def propose(self, rows: np.ndarray, num_draft_tokens: np.ndarray, state: RequestState) -> None:
        """Writes num_draft_tokens[i] >= 1 token ids of the vocabulary behind the known tokens of rows[i], both
        int64 [n]: to state.token_ids[row, n : n + num_draft_tokens[i]], where n is state.columns.num_tokens[row].

        n must be read on the device: results of steps in flight decide it, and the host's count is an upper bound.
        """
