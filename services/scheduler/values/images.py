"""The images of a prompt as the scheduler sees them: their positions and hashes."""

from collections.abc import Sequence

from pagewire.errors import InvalidRequest
from pagewire.v1.common_pb2 import PromptImage

# Once a step has images of this many bytes, no further request enters with it: even with the largest request added, the
# step fits into a gRPC message.
MAX_STEP_IMAGE_BYTES = 16 * 1024 * 1024
MAX_REQUEST_IMAGE_BYTES = 40 * 1024 * 1024


class PromptImages:
    """The images of one prompt, in its order."""

    __slots__ = ("images", "num_bytes")

    def __init__(self, images: Sequence[PromptImage], num_prompt_tokens: int) -> None:
        """Raises InvalidRequest for images that do not fit the prompt or a step."""
        self.images = tuple(images)
        self.num_bytes = sum(image.ByteSize() for image in images)
        if self.num_bytes > MAX_REQUEST_IMAGE_BYTES:
            raise InvalidRequest(
                f"the images take {self.num_bytes} bytes as input of the model, and {MAX_REQUEST_IMAGE_BYTES} are "
                "possible; send fewer or smaller images",
                "images",
            )
        last = 0
        for index, image in enumerate(images):
            end = image.offset + image.num_tokens
            if not last <= image.offset < end <= num_prompt_tokens:
                raise InvalidRequest(
                    f"images[{index}] is at tokens {image.offset} to {end}; images follow each other within the "
                    f"{num_prompt_tokens} tokens of the prompt",
                    f"images[{index}]",
                )
            if len(image.hash) != 32:
                raise InvalidRequest(
                    f"images[{index}].hash has {len(image.hash)} bytes; a sha256 has 32", f"images[{index}].hash"
                )
            last = end

    def keys(self, first: int, end: int) -> bytes:
        """Returns what the KV of tokens first to end - 1 depends on besides their ids: the hash of each overlapping
        image, and its offset from `first`."""
        return b"".join(
            image.hash + (image.offset - first).to_bytes(8, "little", signed=True)
            for image in self.images
            if image.offset < end and first < image.offset + image.num_tokens
        )

    def from_token(self, num_computed_tokens: int) -> list[PromptImage]:
        """Returns the images for an executor that has the KV of the first `num_computed_tokens` tokens; images within
        these have no pixels."""
        return [
            image if num_computed_tokens < image.offset + image.num_tokens else _without_pixels(image)
            for image in self.images
        ]


def _without_pixels(image: PromptImage) -> PromptImage:
    tensors = {name: tensor for name, tensor in image.tensors.items() if name != "pixel_values"}
    return PromptImage(hash=image.hash, offset=image.offset, num_tokens=image.num_tokens, tensors=tensors)


NO_IMAGES = PromptImages((), 0)
