"""One fixed row of state per request, from its admission to its end.

Everything that steps compute with is on the device, in columns indexed by row: sampling writes the next token there
and step inputs are gathered from there, so the next step needs nothing from the host. If nothing is drafted, the host
knows the number of tokens of a row, and of its computed tokens, without seeing a token: every step states how many it
computes, and every sampling adds one. Until its result arrives, a step with drafts counts as if all were accepted: the
host's counts are upper bounds then. The host uses them to check the scheduler's messages; the device decides whatever
must be exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.sampling.constraints import UNRESTRICTED, Constraints
from pagewire.services.executor.sampling.row_columns import RowColumns
from pagewire.services.executor.sampling.sampling_state import SamplingState, column_values
from pagewire.services.executor.step.step import DraftedStep, InvalidStep, NewRequest

_NO_SECOND_TEXT = 1 << 62  # larger than any position


class RequestState:
    """Rows of up to max_num_seqs requests of up to max_model_len tokens each."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        constraints: Constraints = UNRESTRICTED,
    ) -> None:
        self.max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        # int32 [max_num_seqs, max_model_len]
        self.token_ids: Tensor = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=device)
        self.columns = RowColumns(max_num_seqs, device)
        # [max_num_seqs], known tokens, including those on the device only; upper bounds while drafts are in flight
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # [max_num_seqs], likewise
        self.yields_vector = np.zeros(max_num_seqs, dtype=bool)  # [max_num_seqs]
        self.num_vectors = 0  # number of requests that yield one
        self.adapter_slots = np.zeros(max_num_seqs, dtype=np.int32)  # [max_num_seqs], 0 = none
        self._admissions = np.zeros(max_num_seqs, dtype=np.int64)  # [max_num_seqs], number of requests per row
        self._drafted: deque[DraftedStep] = deque()  # in flight, or their results not yet counted
        self._last: DraftedStep | None = None  # the last step, if it had drafts
        self.sampling = SamplingState(max_num_seqs, vocab_size, eos_token_ids, constraints)
        self._row_of: dict[int, int] = {}  # request_id -> row
        self.reset()

    def reset(self) -> None:
        """Empties all rows."""
        for row in self._row_of.values():
            self.sampling.clear(row)
        self._row_of.clear()
        self._drafted.clear()
        self._last = None
        self.num_vectors = 0
        self.adapter_slots[:] = 0
        self._free_rows = list(range(self._max_num_seqs - 1, -1, -1))  # the lowest row is taken first

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._row_of

    def admissions(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64 [n], the number of requests that each row has had."""
        return self._admissions[rows]

    def rows(self, request_ids: Sequence[int]) -> np.ndarray:
        """Returns batch index -> row, int64 [n]. Raises InvalidStep naming an unknown or repeated request."""
        try:
            rows = [self._row_of[request_id] for request_id in request_ids]
        except KeyError as error:
            raise InvalidStep(f"unknown request {error.args[0]}: it has no row here") from None
        if len(set(rows)) != len(rows):
            raise InvalidStep("a request is scheduled twice in one step")
        return np.array(rows, dtype=np.int64)

    def known_rows(self, request_ids: Sequence[int]) -> np.ndarray:
        """Returns the rows of those requests that have one, int64 [at most n]."""
        return np.array([self._row_of[id] for id in request_ids if id in self._row_of], dtype=np.int64)

    def add(self, requests: Sequence[NewRequest]) -> np.ndarray:
        """Fills a row for each request; returns the rows, int64 [n]. Raises InvalidStep."""
        rows = np.array([self._take_row(request) for request in requests], dtype=np.int64)
        self.columns.fill(rows, [self._column_values(request) for request in requests])
        lengths = [len(request.token_ids) for request in requests]
        joined = np.concatenate([request.token_ids for request in requests])
        uploaded = upload(self._device, {"token_ids": joined})["token_ids"]
        for row, token_ids in zip(rows.tolist(), uploaded.split(lengths), strict=True):
            self.token_ids[row, : len(token_ids)] = token_ids
        return rows

    def _take_row(self, request: NewRequest) -> int:
        self._check(request)
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        self.num_tokens[row] = len(request.token_ids)
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.yields_vector[row] = request.yields_vector
        self.num_vectors += request.yields_vector
        self.adapter_slots[row] = request.adapter_slot
        self._admissions[row] += 1
        self.sampling.fill(row, request.sampling, request.num_prompt_tokens, request.matcher)
        return row

    def _column_values(self, request: NewRequest) -> dict[str, float]:
        return {
            "num_tokens": len(request.token_ids),
            "num_computed_tokens": request.num_computed_tokens,
            "num_prompt_tokens": request.num_prompt_tokens,
            "second_text_start": request.second_text_start or _NO_SECOND_TEXT,
            "position_delta": request.position_delta,
            **column_values(request.sampling, self._vocab_size),
        }

    def _check(self, request: NewRequest) -> None:
        name, num_tokens = f"new request {request.request_id}", len(request.token_ids)
        if request.request_id in self._row_of:
            raise InvalidStep(f"{name} already has a row")
        if not self._free_rows:
            raise InvalidStep(f"{name} finds no free row: max_num_seqs is {self._max_num_seqs}")
        if not 1 <= num_tokens <= self.max_model_len:
            raise InvalidStep(f"{name} has {num_tokens} tokens; 1 to {self.max_model_len} are possible")
        if not 0 <= request.num_computed_tokens < num_tokens:
            raise InvalidStep(f"{name} has {request.num_computed_tokens} of {num_tokens} tokens computed")
        if not 1 <= request.num_prompt_tokens <= num_tokens:
            raise InvalidStep(f"{name} has {request.num_prompt_tokens} prompt tokens of {num_tokens}")
        if not 0 <= request.second_text_start < num_tokens:
            raise InvalidStep(f"{name} has a second text from token {request.second_text_start} of {num_tokens} on")
        # Recorded steps on a CPU look up rows of the embedding without another check.
        lowest, highest = int(request.token_ids.min()), int(request.token_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidStep(f"{name} has token id {wrong}, outside the vocabulary of {self._vocab_size}")

    def remove(self, request_id: int) -> None:
        """Frees the request's row. Raises InvalidStep."""
        row = self._row_of.pop(request_id, None)
        if row is None:
            raise InvalidStep(f"unknown request {request_id} cannot finish: it has no row here")
        self.sampling.clear(row)
        self.num_vectors -= int(self.yields_vector[row])
        self.adapter_slots[row] = 0
        self._free_rows.append(row)

    def advance(
        self,
        rows: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        sampled_rows: np.ndarray,
        num_samples: np.ndarray | None = None,
    ) -> DraftedStep | None:
        """Counts a launched step: its tokens are computed, and each sampled row is one token longer.

        num_samples int64 [R]: with drafts, a row is up to this many tokens longer. The actual numbers must be set in
        the DraftedStep later.
        """
        self.num_computed_tokens[rows] += num_scheduled_tokens
        self._last = None
        if num_samples is None:
            self.num_tokens[sampled_rows] += 1
            return None
        self.num_tokens[sampled_rows] += num_samples
        drafted = DraftedStep(sampled_rows, self._admissions[sampled_rows], num_samples)
        self._drafted.append(drafted)
        self._last = drafted
        return drafted

    def settle(self) -> None:
        """Takes back the drafts that were refused in steps with known results."""
        while self._drafted and (num_gained := self._drafted[0].num_gained) is not None:
            drafted = self._drafted.popleft()
            rows, num_refused = self._same_requests(drafted, drafted.num_samples - num_gained)
            self.num_tokens[rows] -= num_refused
            self.num_computed_tokens[rows] -= num_refused

    @property
    def is_exact(self) -> bool:
        """True if the host's counts are exact: no draft is in flight."""
        return not self._drafted

    def least_num_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64 [n], the num_tokens of each row if every draft in flight is refused."""
        if not self._drafted:
            return self.num_tokens[rows]
        least = self.num_tokens.copy()
        for drafted in self._drafted:
            drafted_rows, num_drafts = self._same_requests(drafted, drafted.num_samples - 1)
            least[drafted_rows] -= num_drafts
        return least[rows]

    def common_bounds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bounds of num_tokens, int64 [n] each, equal on all ranks of a group. Ranks learn the result of a
        step at different times, but before the second step after it: so the result of the last step counts as
        unknown."""
        least, most = self.least_num_tokens(rows), self.num_tokens[rows]
        last = self._last
        if last is None or last.num_gained is None or any(drafted is last for drafted in self._drafted):
            return least, most
        gained, refused = np.zeros_like(self.num_tokens), np.zeros_like(self.num_tokens)
        of_rows, counts = self._same_requests(last, last.num_gained)
        gained[of_rows] = counts - 1
        refused[of_rows] = self._same_requests(last, last.num_samples)[1] - counts
        return least - gained[rows], most + refused[rows]

    def _same_requests(self, drafted: DraftedStep, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows that were not given to another request since, and their counts."""
        is_same = self._admissions[drafted.rows] == drafted.admissions
        return drafted.rows[is_same], counts[is_same]
