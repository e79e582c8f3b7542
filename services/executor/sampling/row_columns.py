"""Columns in device memory: the values of each request that kernels read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagewire.config.sampling_params import PARAMETERS
from pagewire.kernels.sampling_parameters import FloatParameter
from pagewire.services.executor.device.upload import upload


class RowColumns:
    """The columns by row that kernels read, each [max_num_seqs]: counts, the values by row of `StepContext`, and the
    sampling parameters with a column in the table of `pagewire.config.sampling_params`.

    floats is a matrix that kernels take as a whole, fp32 [len(FLOATS), max_num_seqs].
    """

    INTS = (  # int64
        "num_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "position_delta",
        "second_text_start",
        *(parameter.name for parameter in PARAMETERS if parameter.column and parameter.type is int),
    )
    FLOATS = tuple(parameter.name.lower() for parameter in FloatParameter)  # fp32, in the order of the kernels

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """Returns a column: every name of INTS and FLOATS is an attribute."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        # Columns of one type are one matrix: requests enter with two writes for any number of columns.
        self._ints = torch.zeros(len(self.INTS), max_num_seqs, dtype=torch.int64, device=device)
        self.floats = torch.zeros(len(self.FLOATS), max_num_seqs, dtype=torch.float32, device=device)
        for names, matrix in ((self.INTS, self._ints), (self.FLOATS, self.floats)):
            for name, column in zip(names, matrix, strict=True):
                setattr(self, name, column)

    def with_own_counts(self) -> RowColumns:
        """Returns the same columns, except for num_tokens and num_computed_tokens, which are new."""
        other = copy.copy(self)
        for name in ("num_tokens", "num_computed_tokens"):
            setattr(other, name, torch.zeros_like(getattr(self, name)))
        return other

    def fill(self, rows: np.ndarray, values: Sequence[dict[str, float]]) -> None:
        """Writes all columns of rows[i] from values[i]."""
        uploaded = upload(
            self._device,
            {
                "ints": np.array([[value[name] for value in values] for name in self.INTS], dtype=np.int64),
                "rows": rows,
                "floats": np.array([[value[name] for value in values] for name in self.FLOATS], dtype=np.float32),
            },
        )
        self._ints.index_copy_(1, uploaded["rows"], uploaded["ints"])
        self.floats.index_copy_(1, uploaded["rows"], uploaded["floats"])
