"""Log probabilities of prompts: of every token but the first, given those before it.

A step that computes some of a prompt's tokens knows the prediction behind each of them. Its lines go to the host with
its results, where they wait for those of the other steps (`prompt_lines`): device memory is needed only for one step's
lines, and for the logits of a part of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.sampling.logprobs import LogprobsMode, token_logprobs
from pagewire.services.executor.step.prompt_lines import PromptPart, ScoredPrompt
from pagewire.services.executor.step.step import InvalidStep, NewRequest, Step

# Size of the fp32 logits of one piece. Larger pieces are hardly faster.
_PIECE_BYTES = 64 * 1024**2


class PromptLogprobs:
    """The scored prompts that are being computed."""

    def __init__(self, model: Model, device: torch.device, mode: LogprobsMode) -> None:
        """mode: matters only in whether it returns logits: a prompt's tokens are not processed."""
        self._model = model
        self._device = device
        self._mode = mode
        self.max_lines = max(1, _PIECE_BYTES // (4 * model.config.vocab_size))  # at once
        self._prompts: dict[int, ScoredPrompt] = {}  # by request id

    def reset(self) -> None:
        """Forgets all requests."""
        self._prompts.clear()

    def update(self, step: Step) -> None:
        """Removes finished requests and adds new ones. Raises InvalidStep."""
        if self._prompts:
            for request_id in step.finished_request_ids:
                self._prompts.pop(request_id, None)
        for request in step.new_requests:
            if request.sampling.HasField("prompt_logprobs") and not request.yields_vector:
                self._enter(request)

    def _enter(self, request: NewRequest) -> None:
        if len(request.token_ids) > request.num_prompt_tokens:
            return  # its next token follows one that came with them
        if request.num_computed_tokens:
            raise InvalidStep(
                f"new request {request.request_id} wants log probabilities of its prompt, of which "
                f"{request.num_computed_tokens} tokens are computed already"
            )
        num_top = min(request.sampling.prompt_logprobs, self._model.config.vocab_size)
        self._prompts[request.request_id] = ScoredPrompt(request.request_id, request.num_prompt_tokens, num_top)

    def compute(
        self, hidden: Tensor, batch: InputBatch, step: Step, state: RequestState
    ) -> tuple[list[PromptPart], dict[str, Tensor]]:
        """Scores the step's tokens of prompts (`runner.prompt_scores`)."""
        if not self._prompts:
            return [], {}
        parts, indices = self._parts(batch, step, state)
        counts = [part.count for part in parts]
        if not sum(counts):
            return parts, {}
        first_places = (batch.query_lens.cumsum() - batch.query_lens)[indices]
        tensors = upload(
            self._device,
            {
                "places": _ranges(first_places, counts),
                "rows": np.repeat(batch.rows[indices], counts),
                "positions": _ranges([part.first for part in parts], counts),
            },
        )
        token_ids = state.token_ids[tensors["rows"], tensors["positions"]].long()
        return parts, self._lines(hidden, tensors["places"], token_ids, max(part.prompt.num_top for part in parts))

    def _parts(self, batch: InputBatch, step: Step, state: RequestState) -> tuple[list[PromptPart], list[int]]:
        """Also returns the indices of their requests in the batch."""
        parts, indices = [], []
        for index, request_id in enumerate(step.request_ids):
            if (prompt := self._prompts.get(request_id)) is None:
                continue
            start, query_len = int(state.num_computed_tokens[batch.rows[index]]), int(batch.query_lens[index])
            # Predictions behind the prompt's last token, and behind drafts, belong to the output.
            count, is_last = min(query_len, prompt.num_tokens - 1 - start), start + query_len >= prompt.num_tokens
            parts.append(PromptPart(prompt, start + 1, count, is_last))
            indices.append(index)
            if is_last:
                del self._prompts[request_id]
        return parts, indices

    def _lines(self, hidden: Tensor, places: Tensor, token_ids: Tensor, num_top: int) -> dict[str, Tensor]:
        """Returns the lines of tokens int64 [n], predicted behind those at `places` in the step."""
        pieces = [
            token_logprobs(self._model.compute_logits(hidden[some]), ids, num_top, self._mode)
            for some, ids in zip(places.split(self.max_lines), token_ids.split(self.max_lines), strict=True)
        ]
        return {
            "prompt_token_ids": torch.cat([piece.token_ids for piece in pieces]),
            "prompt_logprobs": torch.cat([piece.logprobs for piece in pieces]),
            "prompt_ranks": torch.cat([piece.ranks for piece in pieces]),
        }


def _ranges(starts: Sequence[int] | np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Returns int64 ranges of `count` numbers from each start on, one after the other."""
    return np.concatenate(
        [np.arange(start, start + count, dtype=np.int64) for start, count in zip(starts, counts, strict=True)]
    )
