"""Sampling parameters by row, and what the sampler needs of them for one step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.executor.random_sampling import RandomSampling
from services.executor.sampler import LogitBias, LogprobsSelection, Penalties, SamplingBatch
from services.executor.step import ProtocolError, RowSampling
from services.executor.upload import upload

_NO_LOGPROBS = -1
# Below it logits would overflow when they are divided; long before that only the most probable token is ever drawn.
_MIN_TEMPERATURE = 1e-5


class SamplingState:
    """Columns [max_num_seqs] in host memory. `prepare` picks what a step needs and uploads it in one copy."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._top_k = np.full(max_num_seqs, vocab_size, dtype=np.int64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._is_penalized = np.zeros(max_num_seqs, dtype=bool)
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        # A row's end tokens are forbidden while its sequence is shorter than this.
        self._min_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, dtype=np.int64)
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> (token ids, values)
        self._end_token_ids: dict[int, np.ndarray] = {}  # row -> token ids, for rows with min_tokens

    def fill(self, row: int, params: RowSampling, num_prompt_tokens: int) -> None:
        """Raises ProtocolError for token ids outside the vocabulary."""
        self.clear(row)
        self._temperature[row] = params.temperature if params.temperature >= _MIN_TEMPERATURE else 0
        self._top_p[row] = params.top_p
        self._top_k[row] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._min_p[row] = params.min_p
        self._repetition[row] = params.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self._is_penalized[row] = penalties != (1, 0, 0)
        self._seed[row] = params.seed
        self._num_prompt_tokens[row] = num_prompt_tokens
        self._num_logprobs[row] = _NO_LOGPROBS if params.logprobs is None else min(params.logprobs, self._vocab_size)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self._bias[row] = (self._token_ids(ids), np.array(values, dtype=np.float32))
        end_token_ids = params.stop_token_ids + (() if params.ignore_eos else self._eos_token_ids)
        if params.min_tokens > 0 and end_token_ids:
            self._end_token_ids[row] = self._token_ids(sorted(set(end_token_ids)))
            self._min_len[row] = num_prompt_tokens + params.min_tokens

    def _token_ids(self, ids: tuple[int, ...] | list[int]) -> np.ndarray:
        token_ids = np.array(ids, dtype=np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            raise ProtocolError(
                f"a logit_bias or stop token id is outside the vocabulary of {self._vocab_size} tokens: {ids}"
            )
        return token_ids

    def clear(self, row: int) -> None:
        """Forgets what not every row has; `fill` overwrites the columns."""
        self._min_len[row] = 0
        self._bias.pop(row, None)
        self._end_token_ids.pop(row, None)

    def logprobs_of(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """(batch index, alternatives wanted) of the rows that want log probabilities, in batch order."""
        wanted = self._num_logprobs[rows]
        return [(int(index), int(wanted[index])) for index in np.flatnonzero(wanted != _NO_LOGPROBS)]

    def prepare(self, rows: np.ndarray, num_tokens: np.ndarray, device: torch.device) -> SamplingBatch:
        """For rows [S] that are sampled in this step, each having num_tokens [S] tokens so far."""
        arrays: dict[str, np.ndarray] = {}
        random_indices = np.flatnonzero(self._temperature[rows] > 0)
        if len(random_indices):
            self._stage_random(arrays, rows, num_tokens, random_indices)
        penalized = np.flatnonzero(self._is_penalized[rows])
        if len(penalized):
            self._stage_penalties(arrays, rows, num_tokens, penalized)
        if self._bias or self._end_token_ids:
            self._stage_bias(arrays, rows, num_tokens)
        with_logprobs = np.flatnonzero(self._num_logprobs[rows] != _NO_LOGPROBS)
        if 0 < len(with_logprobs) < len(rows):
            arrays["logprobs.batch_indices"] = with_logprobs
        tensors = upload(device, arrays)
        random_rows = rows[random_indices]
        return SamplingBatch(
            bias=LogitBias(**_group(tensors, "bias")) if "bias.values" in arrays else None,
            penalties=Penalties(**_group(tensors, "penalties"), max_num_tokens=int(num_tokens[penalized].max()))
            if len(penalized)
            else None,
            random=self._random(_group(tensors, "random"), random_rows) if len(random_rows) else None,
            logprobs=LogprobsSelection(
                tensors.get("logprobs.batch_indices"), int(self._num_logprobs[rows[with_logprobs]].max())
            )
            if len(with_logprobs)
            else None,
        )

    def _stage_random(
        self, arrays: dict[str, np.ndarray], rows: np.ndarray, num_tokens: np.ndarray, indices: np.ndarray
    ) -> None:
        random_rows = rows[indices]
        if len(indices) < len(rows):
            arrays["random.batch_indices"] = indices
        arrays["random.temperature"] = self._temperature[random_rows]
        arrays["random.seeds"] = self._seed[random_rows]
        arrays["random.positions"] = num_tokens[indices]
        min_p, top_k, top_p = self._min_p[random_rows], self._top_k[random_rows], self._top_p[random_rows]
        if (min_p > 0).any():
            arrays["random.min_p"] = min_p
        if (top_k < self._vocab_size).any():
            arrays["random.top_k"] = top_k
        if (top_p < 1).any():
            arrays["random.top_p"] = top_p

    def _random(self, tensors: dict[str, Tensor], random_rows: np.ndarray) -> RandomSampling:
        top_k = self._top_k[random_rows]
        limited = top_k[top_k < self._vocab_size]
        return RandomSampling(
            batch_indices=tensors.get("batch_indices"),
            temperature=tensors["temperature"],
            seeds=tensors["seeds"],
            positions=tensors["positions"],
            min_p=tensors.get("min_p"),
            top_k=tensors.get("top_k"),
            max_top_k=int(limited.max()) if len(limited) else 0,
            top_p=tensors.get("top_p"),
        )

    def _stage_penalties(
        self, arrays: dict[str, np.ndarray], rows: np.ndarray, num_tokens: np.ndarray, indices: np.ndarray
    ) -> None:
        penalized_rows = rows[indices]
        arrays["penalties.batch_indices"] = indices
        arrays["penalties.rows"] = penalized_rows
        arrays["penalties.num_prompt_tokens"] = self._num_prompt_tokens[penalized_rows]
        arrays["penalties.num_tokens"] = num_tokens[indices]
        arrays["penalties.repetition"] = self._repetition[penalized_rows]
        arrays["penalties.presence"] = self._presence[penalized_rows]
        arrays["penalties.frequency"] = self._frequency[penalized_rows]

    def _stage_bias(self, arrays: dict[str, np.ndarray], rows: np.ndarray, num_tokens: np.ndarray) -> None:
        indices: list[np.ndarray] = []
        token_ids: list[np.ndarray] = []
        values: list[np.ndarray] = []

        def add(index: int, ids: np.ndarray, addends: np.ndarray) -> None:
            indices.append(np.full(len(ids), index, dtype=np.int64))
            token_ids.append(ids)
            values.append(addends)

        for index, row in enumerate(rows.tolist()):
            if row in self._bias:
                add(index, *self._bias[row])
            if num_tokens[index] < self._min_len[row]:
                ids = self._end_token_ids[row]
                add(index, ids, np.full(len(ids), -np.inf, dtype=np.float32))
        if indices:
            arrays["bias.batch_indices"] = np.concatenate(indices)
            arrays["bias.token_ids"] = np.concatenate(token_ids)
            arrays["bias.values"] = np.concatenate(values)


def _group(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
