"""The interface of a model that reads images, in addition to `models.protocol`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from pagewire.services.executor.models.vision.image_forms import ImageForm
from pagewire.services.executor.step.step import Image


@runtime_checkable
class VisionModel(Protocol):
    """A model that reads images."""

    image_token_id: int  # of placeholders
    image_form: ImageForm

    def embed_image(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Encodes one image: its tensors, by the names that transformers uses -> [num_placeholders, hidden_size]"""


@runtime_checkable
class RotatesByAxes(Protocol):
    """A model with image tokens that rotate by time, height and width."""

    def image_positions(self, images: Sequence[Image]) -> tuple[np.ndarray, int]:
        """Returns the positions in time, height and width of all tokens up to the end of the last image, int64
        [3, n], and the delta of the positions of the tokens behind it."""
