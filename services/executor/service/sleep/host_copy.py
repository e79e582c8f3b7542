"""Weights of a device that wait in host memory: their place on the device is free meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from pagewire.services.executor.loading.twins import twins


class HostCopy:
    """The contents of all memory that a model's tensors occupy on a device.

    Tensors stay as they are, views included, and only their memory comes and goes: on its return it has another
    address, so that whatever was recorded or captured with the former one must be made anew.
    """

    def __init__(self, parts: Iterable[Any], device: torch.device, others: Iterable[Tensor] = ()) -> None:
        """Copies the contents. parts: those of the model. others: tensors that are not copied, such as the KV cache.

        Raises torch.OutOfMemoryError, MemoryError or RuntimeError if the host has no room; nothing has changed then.
        """
        left_out = {tensor.untyped_storage().data_ptr() for tensor in others}
        found: dict[int, UntypedStorage] = {}
        for part in parts:
            for tensor, _ in twins(part, part):
                if tensor.device == device and (storage := tensor.untyped_storage()).nbytes():
                    found.setdefault(storage.data_ptr(), storage)
        self._copies = [
            (storage, self._copied(storage, device)) for address, storage in found.items() if address not in left_out
        ]

    @staticmethod
    def _copied(storage: UntypedStorage, device: torch.device) -> Tensor:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        return copy.copy_(_bytes_of(storage))

    @property
    def nbytes(self) -> int:
        """The host memory that the copy takes."""
        return sum(copy.nbytes for _, copy in self._copies)

    def release(self) -> None:
        """Gives the device's memory back; the tensors are empty until `restore`."""
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self) -> None:
        """Takes memory of the device again, and fills it as before. Raises torch.OutOfMemoryError."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
