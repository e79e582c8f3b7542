"""Sampling parameters by row: the values that kernels read, and the rows that need extras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagewire.config.sampling_params import PARAMETERS
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.sampling.constraints import UNRESTRICTED, Constraints
from pagewire.services.executor.sampling.logprobs import LogprobsSelection
from pagewire.services.executor.sampling.sampler import BadWords, LogitBias, Masks, Penalties, SamplingExtras
from pagewire.services.executor.step.matcher import Matcher
from pagewire.services.executor.step.step import InvalidStep
from pagewire.v1.common_pb2 import SamplingParams

_NO_LOGPROBS = -1
_ANY_LEN = np.iinfo(np.int64).max
# Columns that `ops.sample_tokens` does not read: another op is needed if one of them is not at its default.
_PENALTIES = [(one.name, one.default) for one in PARAMETERS if one.column is not None and one.is_eager]
_COLUMNS = [(parameter.name, parameter.column) for parameter in PARAMETERS if parameter.column is not None]


def column_values(params: SamplingParams, vocab_size: int) -> dict[str, float]:
    """The row's values in the columns that kernels read (`row_columns.RowColumns`)."""
    return {name: to_column(getattr(params, name), vocab_size) for name, to_column in _COLUMNS}


class SamplingState:
    """The host's part of sampling, by row [max_num_seqs]: requests' needs beyond `sample_tokens`."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        constraints: Constraints = UNRESTRICTED,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._is_penalized = np.zeros(max_num_seqs, dtype=bool)
        self._num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, dtype=np.int64)
        # A row's end tokens are forbidden while its sequence is shorter than this.
        self._min_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> (token ids, values)
        self._end_token_ids: dict[int, np.ndarray] = {}  # row -> token ids, for rows with min_tokens
        self._allowed: dict[int, np.ndarray] = {}  # row -> int32 [ceil(vocab_size / 32)], a bit per token
        # row -> (int64 [n, P], int64 [n]), see BadWords
        self._bad_words: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.constraints = constraints
        self._of_rows: tuple[dict[int, Any], ...] = (self._bias, self._end_token_ids, self._allowed, self._bad_words)
        self._with_extras: set[int] = set()  # rows with any of these; usually there are none

    def fill(self, row: int, params: SamplingParams, num_prompt_tokens: int, matcher: Matcher | None = None) -> None:
        """Raises InvalidStep for token ids outside the vocabulary."""
        self.clear(row)
        self._is_penalized[row] = any(getattr(params, name) != default for name, default in _PENALTIES)
        has_logprobs = params.HasField("logprobs")
        self._num_logprobs[row] = min(params.logprobs, self._vocab_size) if has_logprobs else _NO_LOGPROBS
        if params.logit_bias_ids:
            values = np.array(params.logit_bias_values, dtype=np.float32)
            self._bias[row] = (self._token_ids(params.logit_bias_ids), values)
        if params.allowed_token_ids and matcher is None:
            self._allowed[row] = self._mask(self._token_ids(params.allowed_token_ids))
        if params.bad_words:
            self._bad_words[row] = self._sequences([list(word.token_ids) for word in params.bad_words])
        end_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if matcher is not None:
            self.constraints.fill(row, matcher, num_prompt_tokens)
        # A grammar enforces min_tokens itself.
        if not params.HasField("grammar") and params.min_tokens > 0 and end_token_ids:
            self._end_token_ids[row] = self._token_ids(sorted(end_token_ids))
            self._min_len[row] = num_prompt_tokens + params.min_tokens
        has_bias = any(row in of_rows for of_rows in self._of_rows)
        if self._is_penalized[row] or has_logprobs or has_bias or matcher is not None:
            self._with_extras.add(row)

    def _token_ids(self, ids: Sequence[int]) -> np.ndarray:
        token_ids = np.array(ids, dtype=np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise InvalidStep(
                f"a token id that sampling names is outside the vocabulary of {self._vocab_size} tokens: {list(ids)}"
            )
        return token_ids

    def _mask(self, token_ids: np.ndarray) -> np.ndarray:
        """Returns int32 [ceil(vocab_size / 32)] with the bits of these ids set; see `ops.mask_tokens`."""
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=bool)
        bits[token_ids] = True
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def _sequences(self, words: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Returns all but the last tokens, int64 [n, P] with -1 before them, and the last tokens, int64 [n]."""
        token_ids = [self._token_ids(word) for word in words]
        prefixes = np.full((len(words), max(map(len, words)) - 1), -1, dtype=np.int64)
        for prefix, word in zip(prefixes, token_ids, strict=True):
            prefix[len(prefix) - len(word) + 1 :] = word[:-1]
        return prefixes, np.array([word[-1] for word in token_ids])

    def clear(self, row: int) -> None:
        """Forgets the row's optional values; `fill` overwrites the columns."""
        self._with_extras.discard(row)
        self.constraints.clear(row)
        self._min_len[row] = 0
        for of_rows in self._of_rows:
            of_rows.pop(row, None)

    def logprobs_of(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """Returns (batch index, alternatives wanted) of the rows with log probabilities, in batch order."""
        if not self._with_extras:
            return []
        wanted = self._num_logprobs[rows]
        return [(int(index), int(wanted[index])) for index in np.flatnonzero(wanted != _NO_LOGPROBS)]

    def prepare(
        self,
        rows: np.ndarray,
        num_tokens: np.ndarray,
        device: torch.device,
        *,
        is_exact: bool = True,
        offsets: np.ndarray | None = None,
    ) -> SamplingExtras | None:
        """Returns the extras for the rows [S] of the positions that are sampled in this step; None: there are none.

        num_tokens [S]: tokens of the sequence before each; if not is_exact, a lower bound, and whatever depends on it
        is decided on the device. offsets int64 [S]: the number of drafts among these.
        """
        if not self._with_extras:
            return None
        arrays: dict[str, np.ndarray] = {}
        self._stage_masks(arrays, rows, num_tokens if is_exact else None, offsets)
        if self._bias or self._end_token_ids:
            self._stage_bias(arrays, rows, num_tokens, is_exact)
        if self._bad_words:
            self._stage_bad_words(arrays, rows)
        penalized = np.flatnonzero(self._is_penalized[rows])
        if len(penalized):
            arrays["penalties.batch_indices"] = penalized.astype(np.int32)
            arrays["penalties.rows"] = rows[penalized].astype(np.int32)
            if offsets is not None:
                arrays["penalties.offsets"] = offsets[penalized].astype(np.int32)
        with_logprobs = np.flatnonzero(self._num_logprobs[rows] != _NO_LOGPROBS)
        if not arrays and not len(with_logprobs):
            return None
        if len(with_logprobs) < len(rows):
            arrays["logprobs.batch_indices"] = with_logprobs
        tensors = upload(device, arrays)
        masks, bias, bad_words, penalties, logprobs = None, None, None, None, None
        if "masks.masks" in tensors:
            masks = Masks(tensors["masks.batch_indices"], tensors["masks.masks"])
        if "bias.values" in tensors:
            bias = LogitBias(
                tensors["bias.batch_indices"],
                tensors["bias.token_ids"],
                tensors["bias.values"],
                tensors.get("bias.min_lens"),
            )
        if "words.prefixes" in tensors:
            bad_words = BadWords(
                tensors["words.batch_indices"], tensors["words.prefixes"], tensors["words.last_token_ids"]
            )
        if len(penalized):
            penalties = Penalties(
                tensors["penalties.batch_indices"], tensors["penalties.rows"], tensors.get("penalties.offsets")
            )
        if len(with_logprobs):
            num_top = int(self._num_logprobs[rows[with_logprobs]].max())
            logprobs = LogprobsSelection(tensors.get("logprobs.batch_indices"), num_top)
        return SamplingExtras(bias, penalties, logprobs, masks, bad_words)

    def _stage_masks(
        self,
        arrays: dict[str, np.ndarray],
        rows: np.ndarray,
        num_tokens: np.ndarray | None,
        offsets: np.ndarray | None,
    ) -> None:
        masked = self.constraints.masks(rows, num_tokens, offsets)
        parts = [] if masked is None else [masked]
        # No row has both: a matcher enforces allowed_token_ids itself.
        allowed = [(index, self._allowed[row]) for index, row in enumerate(rows.tolist()) if row in self._allowed]
        if allowed:
            indices, masks = zip(*allowed, strict=True)
            parts.append((np.array(indices, dtype=np.int32), np.stack(masks)))
        if parts:
            arrays["masks.batch_indices"] = np.concatenate([indices for indices, _ in parts])
            arrays["masks.masks"] = np.concatenate([masks for _, masks in parts])

    def _stage_bad_words(self, arrays: dict[str, np.ndarray], rows: np.ndarray) -> None:
        of_rows = [(index, *self._bad_words[row]) for index, row in enumerate(rows.tolist()) if row in self._bad_words]
        if not of_rows:
            return
        width = max(prefixes.shape[1] for _, prefixes, _ in of_rows)
        arrays["words.batch_indices"] = np.concatenate([np.full(len(last), index) for index, _, last in of_rows])
        padded = [np.pad(one, ((0, 0), (width - one.shape[1], 0)), constant_values=-1) for _, one, _ in of_rows]
        arrays["words.prefixes"] = np.concatenate(padded)
        arrays["words.last_token_ids"] = np.concatenate([last for _, _, last in of_rows])

    def _stage_bias(
        self, arrays: dict[str, np.ndarray], rows: np.ndarray, num_tokens: np.ndarray, is_exact: bool
    ) -> None:
        indices: list[np.ndarray] = []
        token_ids: list[np.ndarray] = []
        values: list[np.ndarray] = []
        min_lens: list[np.ndarray] = []

        def add(index: int, ids: np.ndarray, addends: np.ndarray, min_len: int = _ANY_LEN) -> None:
            indices.append(np.full(len(ids), index, dtype=np.int64))
            token_ids.append(ids)
            values.append(addends)
            min_lens.append(np.full(len(ids), min_len, dtype=np.int64))

        for index, row in enumerate(rows.tolist()):
            if row in self._bias:
                add(index, *self._bias[row])
            if num_tokens[index] < self._min_len[row]:
                ids = self._end_token_ids[row]
                add(index, ids, np.full(len(ids), -np.inf, dtype=np.float32), int(self._min_len[row]))
        if indices:
            arrays["bias.batch_indices"] = np.concatenate(indices)
            arrays["bias.token_ids"] = np.concatenate(token_ids)
            arrays["bias.values"] = np.concatenate(values)
            if not is_exact:
                arrays["bias.min_lens"] = np.concatenate(min_lens)
