"""The columns of device memory that hold what kernels know of each request."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagewire.config.sampling_params import PARAMETERS
from pagewire.services.executor.device.upload import upload


def _names(kind: type) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in PARAMETERS if parameter.column and parameter.type is kind)


class RowColumns:
    """What kernels know of each row; every column is [max_num_seqs]. Meanings: `pagewire.kernels.reference`.

    Beside the counts and what `StepContext` has by row, the sampling parameters that the table of
    `pagewire.config.sampling_params` gives a column.
    """

    INTS = (  # int64
        *("num_tokens", "num_computed_tokens", "num_prompt_tokens", "position_delta", "second_text_start"),
        *_names(int),
    )
    FLOATS = _names(float)  # fp32

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """Every name of INTS and FLOATS is an attribute."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        # Columns of one type are one matrix: requests enter with two writes, however many columns there are.
        self._ints = torch.zeros(len(self.INTS), max_num_seqs, dtype=torch.int64, device=device)
        self._floats = torch.zeros(len(self.FLOATS), max_num_seqs, dtype=torch.float32, device=device)
        for names, matrix in ((self.INTS, self._ints), (self.FLOATS, self._floats)):
            for name, column in zip(names, matrix, strict=True):
                setattr(self, name, column)

    def with_own_counts(self) -> RowColumns:
        """The same columns, but for num_tokens and num_computed_tokens, which are new ones."""
        other = copy.copy(self)
        for name in ("num_tokens", "num_computed_tokens"):
            setattr(other, name, torch.zeros_like(getattr(self, name)))
        return other

    def fill(self, rows: np.ndarray, values: Sequence[dict[str, float]]) -> None:
        """values[i] are all columns of rows[i]."""
        uploaded = upload(
            self._device,
            {
                "ints": np.array([[value[name] for value in values] for name in self.INTS], dtype=np.int64),
                "rows": rows,
                "floats": np.array([[value[name] for value in values] for name in self.FLOATS], dtype=np.float32),
            },
        )
        self._ints.index_copy_(1, uploaded["rows"], uploaded["ints"])
        self._floats.index_copy_(1, uploaded["rows"], uploaded["floats"])
