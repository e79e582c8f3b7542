"""Images of prompts: encoded once each, and handed to the steps that compute their placeholder tokens.

An image is encoded when a step first computes one of its tokens. Its embeddings are kept until its last token is
computed, and after that while there is room: the next prompt with the same image finds them by the image's hash.

Images are checked when their request enters, as only the model knows what it can read. An image that the model cannot
read is the client's error: the request is computed as text, and fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor import stats
from pagewire.services.executor.batch.images.embedding_cache import EmbeddingCache
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.models.vision.image_forms import PIXELS
from pagewire.services.executor.models.vision.vision_model import RotatesByAxes, VisionModel
from pagewire.services.executor.step.failures import Cause, Failure
from pagewire.services.executor.step.step import Image, InvalidImage, InvalidStep, NewRequest, Step
from pagewire.services.executor.step.step_context import StepImages

# Limit of one image, in the tensors that the model reads: memory to encode it is reserved at start.
MAX_IMAGE_BYTES = 32 * 1024 * 1024


@dataclass
class _Prompt:
    """A request with images that are not all computed yet."""

    images: Sequence[Image]
    placeholders: list[np.ndarray]  # per image: int64 [k], places in the prompt
    rope_positions: np.ndarray | None  # int64 [3, end]
    embeddings: dict[int, Tensor] = field(default_factory=dict)  # by index of the image, once encoded

    @property
    def end(self) -> int:
        """Number of tokens up to the end of the last image."""
        return self.images[-1].offset + self.images[-1].num_tokens


class ImageInputs:
    """The images of all requests that have rows."""

    def __init__(self, model: Model, device: torch.device, cache_bytes: int) -> None:
        """cache_bytes: the size of the embeddings that are kept for later requests."""
        self._model = model
        self._device = device
        self._cache = EmbeddingCache(cache_bytes)
        self._prompts: dict[int, _Prompt] = {}  # by request id

    def reset(self) -> None:
        """Forgets all requests; the embeddings stay."""
        self._prompts.clear()

    def on_other_weights(self) -> None:
        self._cache.clear()

    @property
    def smallest(self) -> int:
        """Tokens of the smallest image; 0: the model reads none."""
        if not isinstance(self._model, VisionModel):
            return 0
        form = self._model.image_form
        return form.num_tokens(form.largest(1, 0)) or 0

    def filled(self, request: NewRequest) -> NewRequest:
        """Returns a dummy request with a prompt that ends with the largest images that it has room for."""
        if not isinstance(self._model, VisionModel):
            return request
        form, end = self._model.image_form, request.num_prompt_tokens
        tensors = form.largest(end, MAX_IMAGE_BYTES)
        num_tokens = form.num_tokens(tensors)
        assert num_tokens is not None, "it has pixels"
        token_ids = request.token_ids.copy()
        token_ids[end % num_tokens :] = self._model.image_token_id
        offsets = range(end % num_tokens, end, num_tokens)
        images = [Image(b"%d" % offset, offset, num_tokens, tensors) for offset in offsets]
        return replace(request, token_ids=token_ids, images=images)

    def update(self, step: Step) -> Step:
        """Removes finished requests, adds new ones, and returns the step as specified in `runner.images`."""
        if self._prompts:
            for request_id in step.finished_request_ids:
                self._prompts.pop(request_id, None)
        if not any(request.images for request in step.new_requests):
            return step
        return replace(step, new_requests=[self._enter(request) for request in step.new_requests])

    def _enter(self, request: NewRequest) -> NewRequest:
        if not request.images:
            return request
        try:
            prompt = self._prompt(request)
            delta = self._rotate(prompt)
        except InvalidImage as error:
            return replace(request, images=(), failure=Failure(Cause.IMAGE, str(error)))
        self._prompts[request.request_id] = prompt
        return replace(request, position_delta=delta)

    def _rotate(self, prompt: _Prompt) -> int:
        """Sets the positions of an image's tokens; returns by how much those behind are shifted."""
        if not isinstance(self._model, RotatesByAxes):
            return 0
        prompt.rope_positions, delta = self._model.image_positions(prompt.images)
        if prompt.rope_positions.shape[1] != prompt.end:
            raise InvalidImage("there are other tokens between the placeholder tokens of an image")
        return delta

    def _prompt(self, request: NewRequest) -> _Prompt:
        """Raises InvalidImage."""
        if not isinstance(self._model, VisionModel):
            raise InvalidImage(
                f"the request has images, which {self._model.config.architecture} does not read; leave them out"
            )
        placeholders, last = [], 0
        for index, image in enumerate(request.images):
            end = image.offset + image.num_tokens
            if not last <= image.offset < end <= request.num_prompt_tokens:
                raise InvalidImage(
                    f"images[{index}] is at tokens {image.offset} to {end}; images follow each other within the "
                    f"{request.num_prompt_tokens} tokens of the prompt"
                )
            is_placeholder = request.token_ids[image.offset : end] == self._model.image_token_id
            placeholders.append(np.flatnonzero(is_placeholder) + image.offset)
            try:
                self._check(image, placeholders[-1], request.num_computed_tokens)
            except InvalidImage as error:
                raise InvalidImage(f"images[{index}]: {error}") from error
            last = end
        return _Prompt(request.images, placeholders, None)

    def _check(self, image: Image, placeholders: np.ndarray, num_computed_tokens: int) -> None:
        """Raises InvalidImage unless the model can encode it for these places [k] of the prompt."""
        assert isinstance(self._model, VisionModel)
        pixels = image.tensors.get(PIXELS)
        if pixels is not None and pixels.nbytes > MAX_IMAGE_BYTES:
            raise InvalidImage(f"its {PIXELS} have {pixels.nbytes} bytes; {MAX_IMAGE_BYTES} are possible")
        num_tokens = self._model.image_form.num_tokens(image.tensors)
        if num_tokens is not None and num_tokens != len(placeholders):
            raise InvalidImage(
                f"it stands for {num_tokens} placeholder tokens (id {self._model.image_token_id}); the prompt has "
                f"{len(placeholders)} at its place"
            )
        if pixels is None and any(placeholders >= num_computed_tokens):
            raise InvalidImage(f"there is no {PIXELS}, and its tokens are still to be computed")

    def of(self, batch: InputBatch, step: Step, state: RequestState) -> StepImages | None:
        """Returns the part of the step that belongs to prompts with images; None if there is none."""
        if not self._prompts:
            return None
        parts = _Parts()
        starts = batch.query_lens.cumsum() - batch.query_lens
        for request_id, row, start, query_len in zip(
            step.request_ids, batch.rows.tolist(), starts.tolist(), batch.query_lens.tolist(), strict=True
        ):
            if (prompt := self._prompts.get(request_id)) is not None:
                first = int(state.num_computed_tokens[row])
                self._collect(prompt, first, first + query_len, start - first, parts)
                if first + query_len >= prompt.end:
                    del self._prompts[request_id]
        return parts.step_images(self._device)

    def _collect(self, prompt: _Prompt, first: int, end: int, shift: int, parts: _Parts) -> None:
        """Adds tokens first to end of a prompt. shift: from a place in the prompt to that in the batch."""
        parts.has_some = True
        if prompt.rope_positions is not None:
            positions = prompt.rope_positions[:, first:end]
            parts.rope_positions.append(positions)
            parts.rope_tokens.append(np.arange(first, first + positions.shape[1]) + shift)
        for index, places in enumerate(prompt.placeholders):
            low, high = np.searchsorted(places, (first, end)).tolist()
            if low < high:
                if index not in prompt.embeddings:
                    prompt.embeddings[index] = self._encode(prompt.images[index], len(places))
                parts.embeddings.append(prompt.embeddings[index][low:high])
                parts.tokens.append(places[low:high] + shift)
                if high == len(places):
                    del prompt.embeddings[index]

    def _encode(self, image: Image, num_placeholders: int) -> Tensor:
        """[num_placeholders, hidden_size]"""
        key = (image.hash, num_placeholders)  # the client states the hash
        embeddings = self._cache.get(key)
        stats.IMAGES.labels("encoded" if embeddings is None else "found").inc()
        if embeddings is None:
            assert isinstance(self._model, VisionModel)
            embeddings = self._model.embed_image(upload(self._device, dict(image.tensors)))
            self._cache.put(key, embeddings)
        if len(embeddings) != num_placeholders:
            raise InvalidStep(
                f"an image has {len(embeddings)} embeddings for {num_placeholders} placeholder tokens: config.json and "
                "the model's vision tower disagree"
            )
        return embeddings


@dataclass
class _Parts:
    """Collects the images of a step."""

    embeddings: list[Tensor] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    rope_positions: list[np.ndarray] = field(default_factory=list)
    rope_tokens: list[np.ndarray] = field(default_factory=list)
    has_some: bool = False

    def step_images(self, device: torch.device) -> StepImages | None:
        if not self.has_some:
            return None
        arrays = {"tokens": np.concatenate([np.empty(0, dtype=np.int64), *self.tokens])}
        if self.rope_tokens:
            arrays["rope_positions"] = np.concatenate(self.rope_positions, axis=1)
            arrays["rope_tokens"] = np.concatenate(self.rope_tokens)
        uploaded = upload(device, arrays)
        return StepImages(
            embeddings=torch.cat(self.embeddings) if self.embeddings else None,
            tokens=uploaded["tokens"],
            rope_positions=uploaded.get("rope_positions"),
            rope_tokens=uploaded.get("rope_tokens"),
        )
