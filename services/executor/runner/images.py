"""The seam for images in prompts."""

from __future__ import annotations

from typing import Protocol

from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.step.step import InvalidStep, NewRequest, Step
from pagewire.services.executor.step.step_context import StepImages


class Images(Protocol):
    """The images of all requests that have rows."""

    @property
    def smallest(self) -> int:
        """Tokens of the smallest image; 0: the model reads no images."""

    def reset(self) -> None:
        """Forgets all requests."""

    def on_other_weights(self) -> None:
        """Forgets what was computed with the previous weights."""

    def update(self, step: Step) -> Step:
        """Returns the step with the row values that follow from the images of new requests, and with a failure for each
        request with images that the model cannot read."""

    def of(self, batch: InputBatch, step: Step, state: RequestState) -> StepImages | None:
        """Returns the part of the step that belongs to prompts with images; None if there is none."""

    def filled(self, request: NewRequest) -> NewRequest:
        """Returns a dummy request with a prompt that ends with the largest images that it has room for."""


class _NoImages:
    """Takes no images."""

    smallest = 0

    def reset(self) -> None:
        pass

    def on_other_weights(self) -> None:
        pass

    def update(self, step: Step) -> Step:
        if any(request.images for request in step.new_requests):
            raise InvalidStep("a new request has images, which this runner does not support")
        return step

    def of(self, batch: InputBatch, step: Step, state: RequestState) -> None:
        return None

    def filled(self, request: NewRequest) -> NewRequest:
        return request


NO_IMAGES: Images = _NoImages()
