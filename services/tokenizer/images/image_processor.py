"""The work of an image worker: turns the bytes of an image file into the tensors of the model's vision tower.

It runs in a separate process, the only one that imports transformers, numpy and Pillow: a malicious file may crash it
or use up its memory, but nothing else. transformers' Pillow processors need no torch.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# As in Qwen's processor: a one-line image would be enlarged until memory is exhausted.
MAX_ASPECT_RATIO = 200
# Each scan of a progressive JPEG decodes the whole image but takes less than a hundred bytes. Encoders write ten scans.
MAX_JPEG_SCANS = 100
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_JPEG_MARKER = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")  # excludes what scans contain: \xff\x00 and restarts
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


class ImageError(ValueError):
    """The image cannot be read; the message gives the client the reason."""


@dataclass(frozen=True)
class PlainTensor:
    """A tensor as plain data."""

    data: bytes
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ProcessedImage:
    hash: bytes  # sha256 of the tensors
    tensors: Mapping[str, PlainTensor]  # by the names that transformers gives them
    text: str  # represents the image in the prompt: placeholder tokens and their frame
    num_placeholders: int


@dataclass(frozen=True)
class ImageProcessorSource:
    """The data needed to make an ImageProcessor in another process."""

    path: str  # of the model's directory
    image_token: str  # the placeholder, as text
    max_pixels: int
    options: Mapping[str, Any] = field(default_factory=dict)  # override preprocessor_config.json

    def make(self) -> ImageProcessor:
        """Makes the processor. Called in a separate process."""
        sys.modules["torch"] = None  # type: ignore[assignment]  # where it is installed, it would only cost memory
        return ImageProcessor(self)


class ImageProcessor:
    """The model's own image processor, and the number of placeholders of an image."""

    def __init__(self, source: ImageProcessorSource) -> None:
        """Raises ImportError, OSError or ValueError."""
        # It would warn for every processor that torchvision is missing.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        from transformers import AutoConfig, AutoImageProcessor

        self._source = source
        self._config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
        self._process = AutoImageProcessor.from_pretrained(
            source.path, backend="pil", trust_remote_code=False, **source.options
        )
        known = sorted(self._process.valid_kwargs.__annotations__)
        for name in source.options.keys() - set(known):  # transformers would ignore it
            kind = type(self._process).__name__.removesuffix("Pil")
            raise ValueError(f"{name!r} is not a setting of {kind}, which has {', '.join(known)}")

    def check(self) -> None:
        """Reads a small gray image, as requests will. Raises any exception, or ImageError for a wrong result."""
        import numpy as np
        from PIL import Image

        file = io.BytesIO()
        Image.new("RGB", (64, 64), (90, 100, 110)).save(file, "PNG")
        processed = self.process(file.getvalue())
        pixels = processed.tensors["pixel_values"]
        if not pixels.data or not np.isfinite(np.frombuffer(pixels.data, pixels.dtype)).all():
            raise ImageError(f"the tensor of an image, of shape {list(pixels.shape)}, is empty or not finite")
        if not processed.num_placeholders:
            raise ImageError("an image has no placeholder tokens")

    def process(self, data: bytes) -> ProcessedImage:
        """Returns the tensors of an image. data: the content of an image file. Raises ImageError."""
        image = decode(data, self._source.max_pixels)
        options = {"return_row_col_info": True} if self._has_tiles else {}
        try:
            outputs = dict(self._process(image, return_tensors="np", **options))
        except (ValueError, ZeroDivisionError, MemoryError) as error:
            raise ImageError(f"the model's image processor refuses it: {error}") from error
        grid = (outputs.pop("rows", [[0]])[0][0], outputs.pop("cols", [[0]])[0][0])
        outputs.pop("pixel_attention_mask", None)  # an image alone has no padding
        tensors = {name: _plain(name, tensor) for name, tensor in outputs.items()}
        text = self._text(tensors, outputs, grid)
        digest = hashlib.sha256()
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape} ".encode() + tensor.data)
        return ProcessedImage(digest.digest(), tensors, text, text.count(self._source.image_token))

    @property
    def _has_tiles(self) -> bool:
        return self._config.model_type in ("idefics3", "smolvlm")

    def _text(self, tensors: Mapping[str, PlainTensor], outputs: Mapping[str, Any], grid: tuple[int, int]) -> str:
        """Returns the text that transformers' processors write in place of one image token."""
        vision, token = self._config.vision_config, self._source.image_token
        if "image_grid_thw" in outputs:
            return token * int(outputs["image_grid_thw"].prod() // vision.spatial_merge_size**2)
        *_, height, width = tensors["pixel_values"].shape
        num_tokens = (height // vision.patch_size) * (width // vision.patch_size)
        if self._has_tiles:
            return _tiles_text(grid, token * (num_tokens // self._config.scale_factor**2))
        num_tokens += vision.model_type == "clip_vision_model"  # its class token
        return token * (num_tokens - (self._config.vision_feature_select_strategy == "default"))


def _tiles_text(grid: tuple[int, int], placeholders: str) -> str:
    """As `Idefics3Processor.replace_image_token`: rows of tiles, then the whole image."""
    frame, num_rows, num_cols = "<fake_token_around_image>", *grid
    rows = [
        "".join(f"{frame}<row_{row + 1}_col_{col + 1}>{placeholders}" for col in range(num_cols)) + "\n"
        for row in range(num_rows)
    ]
    return "".join(rows) + "\n" * bool(rows) + f"{frame}<global-img>{placeholders}{frame}"


def _plain(name: str, tensor: Any) -> PlainTensor:
    import numpy as np

    array = np.ascontiguousarray(tensor, dtype=np.int64 if name == "image_grid_thw" else np.float32)
    return PlainTensor(array.tobytes(), array.shape, str(array.dtype))


def decode(data: bytes, max_pixels: int) -> Any:
    """Returns the image upright and in RGB, transparent parts on white. Raises ImageError."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # checked below
    if not data:
        raise ImageError("it is empty")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        _check_size(width, height, max_pixels)
        if image.format in ("JPEG", "MPO"):
            _check_scans(data)
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise ImageError(f"it is animated, with {getattr(image, 'n_frames', 0)} frames; send one of them")
        image.load()
        return _to_rgb(ImageOps.exif_transpose(image))
    except ImageError:
        raise
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"it is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise exceptions of any kind
        raise ImageError(f"it is damaged: {str(error) or type(error).__name__}") from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if not width or not height:
        raise ImageError(f"it has {width} x {height} pixels")
    if width * height > max_pixels:
        raise ImageError(f"it has {width} x {height} pixels; {max_pixels} are possible (--max-image-pixels)")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(f"it has {width} x {height} pixels; one side may be {MAX_ASPECT_RATIO} times the other")


def _check_scans(jpeg: bytes) -> None:
    """Counts scans up to the image's end: a camera may append other data, such as a video."""
    num_scans, position = 0, 0
    while (marker := _JPEG_MARKER.search(jpeg, position)) is not None and marker[1][0] != _EOI:
        position = marker.end()
        num_scans += marker[1][0] == _SOS
        if num_scans > MAX_JPEG_SCANS:
            raise ImageError(f"it has more than {MAX_JPEG_SCANS} scans")
        if marker[1][0] != _SOI:
            position += int.from_bytes(jpeg[position : position + 2], "big")  # the length of what the marker begins


def _to_rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of gray; the upper eight are used
        image = image.point(lambda value: value / 256).convert("L")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
