"""The tensors of an image for each kind of model, and its number of placeholder tokens.

A client's tensors are checked against this before a vision tower reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Protocol

import numpy as np

from pagewire.services.executor.step.step import InvalidImage

PIXELS = "pixel_values"
_GRID = "image_grid_thw"


class ImageForm(Protocol):
    def num_tokens(self, tensors: Mapping[str, np.ndarray]) -> int | None:
        """Returns the number of placeholder tokens of an image; None if it has no pixels and no other tensor tells.

        Raises InvalidImage, which states the expected form.
        """

    def largest(self, max_tokens: int, max_bytes: int) -> dict[str, np.ndarray]:
        """Returns a black image: the largest within these tokens and bytes, or the smallest if that is larger."""


@dataclass(frozen=True)
class OneSize:
    """LLaVA's: all images are scaled to the same size."""

    shape: tuple[int, ...]  # of pixel_values
    tokens: int

    def num_tokens(self, tensors: Mapping[str, np.ndarray]) -> int | None:
        _check_names(tensors, {PIXELS: "float32"})
        if PIXELS in tensors and tensors[PIXELS].shape != self.shape:
            raise _wrong(PIXELS, tensors[PIXELS], f"{list(self.shape)}, images of the size that the model was made for")
        return self.tokens

    def largest(self, max_tokens: int, max_bytes: int) -> dict[str, np.ndarray]:
        return {PIXELS: np.zeros(self.shape, np.float32)}


@dataclass(frozen=True)
class Tiles:
    """Idefics3's: one or more squares of the same size."""

    num_channels: int
    max_side: int  # pixels
    token_side: int  # pixels of a square that becomes one token

    def num_tokens(self, tensors: Mapping[str, np.ndarray]) -> int | None:
        _check_names(tensors, {PIXELS: "float32"})
        if PIXELS not in tensors:
            return None
        shape = tensors[PIXELS].shape
        side = shape[-1] if shape else 0
        is_square = len(shape) == 5 and shape == (1, shape[1], self.num_channels, side, side)
        if not is_square or not shape[1] or not 0 < side <= self.max_side or side % self.token_side:
            raise _wrong(
                PIXELS,
                tensors[PIXELS],
                f"[1, tiles, {self.num_channels}, side, side], at least one tile, with a side of a multiple of "
                f"{self.token_side} up to {self.max_side}",
            )
        return int(shape[1] * self._tokens_of_tile(side))

    def _tokens_of_tile(self, side: int) -> int:
        return (side // self.token_side) ** 2

    def largest(self, max_tokens: int, max_bytes: int) -> dict[str, np.ndarray]:
        side = self.max_side - self.max_side % self.token_side
        num_bytes = self.num_channels * side**2 * 4
        num_tiles = max(1, min(max_tokens // self._tokens_of_tile(side), max_bytes // num_bytes))
        return {PIXELS: np.zeros((1, num_tiles, self.num_channels, side, side), np.float32)}


@dataclass(frozen=True)
class Patches:
    """Qwen2-VL's: patches of an image of any size, line by line, and their grid."""

    patch_values: int  # of all channels, and of a frame and its repetition
    merge_size: int  # patches of a side that make one token

    def num_tokens(self, tensors: Mapping[str, np.ndarray]) -> int | None:
        _check_names(tensors, {PIXELS: "float32", _GRID: "int64"})
        if _GRID not in tensors:
            raise InvalidImage(f"there is no {_GRID}; it tells how the patches lie")
        grid = tensors[_GRID]
        time, height, width = map(int, grid.reshape(-1)) if grid.shape == (1, 3) else (0, 0, 0)
        merge = self.merge_size
        if time != 1 or min(height, width) <= 0 or height % merge or width % merge:
            found = f"{grid.tolist()!r:.100}"
            raise InvalidImage(
                f"{_GRID} is {found}; expected [[1, height, width]] in patches, both multiples of {merge}"
            )
        if PIXELS in tensors and tensors[PIXELS].shape != (height * width, self.patch_values):
            raise _wrong(
                PIXELS,
                tensors[PIXELS],
                f"{[height * width, self.patch_values]}, the patches of a {height} x {width} grid",
            )
        return height * width // merge**2

    def largest(self, max_tokens: int, max_bytes: int) -> dict[str, np.ndarray]:
        merge = self.merge_size
        num_tokens = max(1, min(max_tokens, max_bytes // (self.patch_values * 4 * merge**2)))
        height = isqrt(num_tokens)
        grid = (height * merge, num_tokens // height * merge)
        return {
            PIXELS: np.zeros((grid[0] * grid[1], self.patch_values), np.float32),
            _GRID: np.array([[1, *grid]], np.int64),
        }


def _check_names(tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    for name, array in tensors.items():
        if name not in dtypes:
            raise InvalidImage(f"{name!r:.50} is not among the tensors of an image, {', '.join(dtypes)}")
        if array.dtype != dtypes[name]:
            raise InvalidImage(f"{name} is {array.dtype}; expected {dtypes[name]}")


def _wrong(name: str, found: np.ndarray, expected: str) -> InvalidImage:
    return InvalidImage(f"{name} has the shape {list(found.shape)}; expected {expected}")
