"""Weights from GGUF files: blocks as they are stored, or dequantized."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.parts import Index, StoredPart, indices, select
from pagewire.services.executor.loading.weights.gguf_file import GgufFile, GgufTensor
from pagewire.services.executor.loading.weights.gguf_names import RowOrders, form_of, named_tensors

_CHUNK_ELEMENTS = 1 << 16  # dequantized at a time: temporaries stay in the core's cache and in reused memory


class GgufSource:
    """Dequantizes tensors into the model's memory, a few rows at a time."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._tensors = named_tensors(file)
        self._row_orders = RowOrders(file)
        form = form_of(file)
        self._norms_with_one, self._values = form.norms_with_one, form.values
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def raw(self, name: str, index: Sequence[Index] = (), view: Sequence[int] | None = None) -> Tensor:
        blocks, order = torch.from_numpy(self._tensors[name].data), self._row_orders.of(name)
        blocks = blocks if view is None else blocks.view(*view)
        if order is None:
            return select(blocks, index)
        rows, *others = index or (None,)
        ordered = torch.from_numpy(order)
        return select(blocks, (ordered if rows is None else select(ordered, (rows,)), *others))

    def raw_dtype(self, name: str) -> torch.dtype:
        return torch.uint8

    def stored_bytes(self, name: str) -> int:
        return self._tensors[name].data.nbytes

    def type(self, name: str) -> GGMLQuantizationType:
        return self._tensors[name].type

    def read_into(self, name: str, target: Tensor, first_row: int = 0, part: StoredPart | None = None) -> None:
        tensor, rows = self._tensors[name], self._row_orders.of(name)
        columns: Index = None
        if part is not None:
            chosen, columns = part.index[0], part.index[1] if len(part.index) > 1 else None
            if chosen is not None:
                own = indices(chosen).numpy()
                rows = own if rows is None else rows[own]
        num_rows = target.shape[0]
        if len(tensor.shape) == 1:  # its elements may share blocks
            vector = self._dequantize(tensor, tensor.data).reshape(-1)
            if self._norms_with_one and name.endswith("norm.weight"):
                vector = vector - 1
            for end, values in self._values.items():
                if name.endswith(end):
                    vector = self._checked(tensor, values(vector))
            ordered = torch.from_numpy(vector if rows is None else vector[rows])
            target.copy_(ordered[first_row : first_row + num_rows])
            return
        row_shape, data = target.shape[1:], tensor.data.reshape(tensor.shape[0], -1)
        skipped = 0  # leading numbers of a row that were read only because they share a block with others
        if columns is not None:
            assert isinstance(columns, range), "a GGUF file has outputs along rows"
            block, size = GGML_QUANT_SIZES[tensor.type]
            first = columns.start // block
            data, skipped = data[:, first * size : -(-columns.stop // block) * size], columns.start - first * block
        rows_per_chunk = max(1, _CHUNK_ELEMENTS // math.prod(row_shape))
        for start in range(0, num_rows, rows_per_chunk):
            stop = min(start + rows_per_chunk, num_rows)
            these = slice(first_row + start, first_row + stop)
            chunk = self._dequantize(tensor, data[these] if rows is None else data[rows[these]])
            numbers = torch.from_numpy(chunk).view(stop - start, -1)
            target[start:stop] = numbers[:, skipped : skipped + math.prod(row_shape)].reshape(-1, *row_shape)

    def _checked(self, tensor: GgufTensor, values: np.ndarray) -> np.ndarray:
        if not np.isfinite(values).all():
            raise ModelLoadError(
                f"{self._file.path}: tensor {tensor.name} has values that none can have; the file is damaged: download "
                "or convert it again"
            )
        return values

    def _dequantize(self, tensor: GgufTensor, data: np.ndarray) -> np.ndarray:
        try:
            with np.errstate(
                invalid="ignore", over="ignore"
            ):  # numbers of damaged files are reported where they are used
                return dequantize(data.reshape(1, -1), tensor.type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self._file.path}: tensor {tensor.name} has type {tensor.type.name}, which cannot be dequantized; "
                "convert the model to another quantization"
            ) from error
