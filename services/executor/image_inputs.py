"""Images of prompts: encoded once each, and handed to the steps that compute their placeholder tokens.

An image is encoded when a step first computes one of its tokens. Its embeddings are kept while its request's prompt is
not computed, however many steps that takes, and beyond that as long as there is room: the next prompt with the same
image finds them by the image's hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor import stats
from pagewire.services.executor.input_batch import InputBatch
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.request_state import RequestState
from pagewire.services.executor.step import Image, InvalidStep, NewRequest, Step
from pagewire.services.executor.step_context import StepImages
from pagewire.services.executor.upload import upload


@runtime_checkable
class VisionModel(Protocol):
    """A model that reads images."""

    image_token_id: int  # of placeholders

    def embed_image(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One image's tensors, by the names that transformers gives them -> [num_placeholders, hidden_size]"""


@runtime_checkable
class RotatesByAxes(Protocol):
    """A model whose image tokens rotate by time, height and width."""

    def image_positions(self, images: Sequence[Image]) -> tuple[np.ndarray, int]:
        """(int64 [3, n]: time, height and width of all tokens up to the last image's last, delta of those behind)"""


@dataclass
class _Prompt:
    """A request with images, while these are not all computed."""

    images: Sequence[Image]
    placeholders: list[np.ndarray]  # of each image: int64 [k], their places in the prompt
    rope_positions: np.ndarray | None  # int64 [3, end]
    embeddings: dict[int, Tensor] = field(default_factory=dict)  # by index of the image, once encoded

    @property
    def end(self) -> int:
        """Tokens up to the last image's last."""
        return self.images[-1].offset + self.images[-1].num_tokens


class ImageInputs:
    """The images of all requests that have rows."""

    def __init__(self, model: Model, device: torch.device, cache_bytes: int) -> None:
        """cache_bytes: of embeddings that are kept for later requests."""
        self._model = model
        self._device = device
        self._cache = EmbeddingCache(cache_bytes)
        self._prompts: dict[int, _Prompt] = {}  # by request id

    def reset(self) -> None:
        """Forgets all requests; the embeddings stay."""
        self._prompts.clear()

    def update(self, step: Step) -> Step:
        """Takes in who leaves and who enters; returns the step with what rows are to know of it. Raises InvalidStep."""
        if self._prompts:
            for request_id in step.finished_request_ids:
                self._prompts.pop(request_id, None)
        if not any(request.images for request in step.new_requests):
            return step
        return replace(step, new_requests=[self._enter(request) for request in step.new_requests])

    def _enter(self, request: NewRequest) -> NewRequest:
        if not request.images:
            return request
        prompt = self._prompts[request.request_id] = self._prompt(request)
        if not isinstance(self._model, RotatesByAxes):
            return request
        prompt.rope_positions, delta = self._model.image_positions(request.images)
        if prompt.rope_positions.shape[1] != prompt.end:
            raise InvalidStep(
                f"new request {request.request_id}: its images' grids have {prompt.rope_positions.shape[1]} tokens up "
                f"to the last image's last, its prompt has {prompt.end}"
            )
        return replace(request, position_delta=delta)

    def _prompt(self, request: NewRequest) -> _Prompt:
        if not isinstance(self._model, VisionModel):
            architecture = self._model.config.architecture
            raise InvalidStep(f"new request {request.request_id} has images; {architecture} reads none")
        placeholders, last = [], 0
        for image in request.images:
            end = image.offset + image.num_tokens
            if not last <= image.offset < end <= request.num_prompt_tokens:
                raise InvalidStep(f"new request {request.request_id}: an image is at {image.offset} to {end}")
            is_placeholder = request.token_ids[image.offset : end] == self._model.image_token_id
            placeholders.append(np.flatnonzero(is_placeholder) + image.offset)
            last = end
        return _Prompt(request.images, placeholders, None)

    def of(self, batch: InputBatch, step: Step, state: RequestState) -> StepImages | None:
        """What the step computes of prompts with images; None: nothing."""
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

    def _encode(self, image: Image, num_placeholders: int) -> Tensor:
        """[num_placeholders, hidden_size]"""
        embeddings = self._cache.get(image.hash)
        stats.IMAGES.labels("encoded" if embeddings is None else "found").inc()
        if embeddings is None:
            assert isinstance(self._model, VisionModel)
            embeddings = self._model.embed_image(upload(self._device, dict(image.tensors)))
            self._cache.put(image.hash, embeddings)
        if len(embeddings) != num_placeholders:
            raise InvalidStep(f"an image has {len(embeddings)} embeddings for {num_placeholders} placeholder tokens")
        return embeddings


@dataclass
class _Parts:
    """A step's images while they are collected."""

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


class EmbeddingCache:
    """Embeddings of images by hash; those longest unused go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, image_hash: bytes) -> Tensor | None:
        if image_hash in self._entries:
            self._entries.move_to_end(image_hash)
        return self._entries.get(image_hash)

    def put(self, image_hash: bytes, embeddings: Tensor) -> None:
        """Embeddings that are not in it; they are not kept if they alone are too many."""
        if embeddings.nbytes > self._max_bytes:
            return
        self._entries[image_hash] = embeddings
        self._num_bytes += embeddings.nbytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.nbytes
