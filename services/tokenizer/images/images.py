"""Images of chats, from their URLs to text in the prompt and tensors for the executor."""

import asyncio
import logging
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from pagewire.config import TokenizerConfig
from pagewire.config.values.tokenizer import image_limit, processor_options
from pagewire.errors import StartupError
from pagewire.files.json_file import read_json_object
from pagewire.files.models import is_of_hub
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.process.worker_process import WorkerDiedError, WorkerProcess, WorkerTooSlowError
from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.images.image_processor import (
    ImageError,
    ImageProcessorSource,
    ProcessedImage,
)
from pagewire.services.tokenizer.images.media import MediaError, MediaReader
from pagewire.services.tokenizer.pool.image_reader import NONE, ChatImages, ImageReader, NoImages
from pagewire.services.tokenizer.templates.chat_messages import image_urls
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import ChatPrompt
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# config.json's model_type -> its key of the placeholder's token id
_IMAGE_TOKEN_KEYS = {
    "llava": "image_token_index",
    "idefics3": "image_token_id",
    "smolvlm": "image_token_id",
    "qwen2_5_vl": "image_token_id",
    "qwen2_vl": "image_token_id",
}
_PACKAGES = {"transformers": "transformers", "numpy": "numpy", "PIL": "pillow"}
NUM_WORKERS = 2
# The largest images and the start of a worker take a few seconds. Some files cost a decoder hours.
MAX_SECONDS = 60.0
# The limit of one request: its tensors are sent in one message.
MAX_TENSOR_BYTES = 32 * 1024 * 1024


class ReadImages:
    """The images of one chat, as tensors: `ChatImages` of a model that reads images."""

    def __init__(self, images: Sequence[ProcessedImage], image_token_id: int) -> None:
        self._images = images
        self._image_token_id = image_token_id
        self.texts = [image.text for image in images]

    def placed(self, token_ids: Sequence[int]) -> list[common_pb2.PromptImage]:
        """Returns the images with the places of their placeholders. Raises RpcError if there are other placeholders."""
        places = [place for place, token_id in enumerate(token_ids) if token_id == self._image_token_id]
        if len(places) != sum(image.num_placeholders for image in self._images):
            raise _invalid(
                f"the prompt has {len(places)} placeholder tokens of images, the images have "
                f"{sum(image.num_placeholders for image in self._images)}: no text may contain the placeholder itself"
            )
        found, start = [], 0
        for image in self._images:
            own = places[start : start + image.num_placeholders]
            start += image.num_placeholders
            placed = common_pb2.PromptImage(hash=image.hash, offset=own[0], num_tokens=own[-1] - own[0] + 1)
            for name, tensor in image.tensors.items():  # in place: a message given to a constructor is copied
                target = placed.tensors[name]
                target.data, target.dtype = tensor.data, tensor.dtype
                target.shape.extend(tensor.shape)
            found.append(placed)
        return found


class ImageWorkers:
    """Reads the images of chats: URLs on the event loop, bytes in worker processes, which make tensors of them."""

    def __init__(self, source: ImageProcessorSource, image_token_id: int, media: MediaReader, limit: int) -> None:
        """limit: the most images of one request."""
        self._image_token_id = image_token_id
        self.image_token = source.image_token
        self._media = media
        self._limit = limit
        self._source = source
        self._workers = [WorkerProcess(source.make)]
        # The worker that became idle last comes next: another one is started (None) only when all are busy.
        self._idle: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for worker in (*[None] * (NUM_WORKERS - 1), *self._workers):
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="images")

    def check(self) -> None:
        """Reads one image. Raises StartupError if the settings of the model or of the operator make that impossible."""
        try:
            self._workers[0].call("check", (), MAX_SECONDS)
        except Exception as error:  # its classes raise exceptions of any kind
            cause = str(error) or type(error).__name__
            raise StartupError(
                f"{self._source.path}: the model's image processor reads no image ({cause}); correct "
                "preprocessor_config.json or --mm-processor-kwargs, or serve text alone with --limit-mm-per-prompt "
                "image=0"
            ) from error

    async def read(self, chat: ChatPrompt) -> ChatImages:
        urls = image_urls(chat)
        if not urls:
            return NONE
        if len(urls) > self._limit:
            raise _invalid(
                f"the messages have {len(urls)} images; at most {self._limit} are possible (--limit-mm-per-prompt)"
            )
        fetches = [asyncio.ensure_future(self._media.read(url)) for url in urls]
        try:
            return ReadImages(await self._read_all(fetches, chat), self._image_token_id)
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)  # one of several failures is reported

    async def _read_all(self, fetches: Sequence[asyncio.Future[bytes]], chat: ChatPrompt) -> list[ProcessedImage]:
        images: list[ProcessedImage] = []
        num_bytes = 0
        for index, fetch in enumerate(fetches):
            try:
                image = await self._process(await fetch)
            except (MediaError, ImageError) as error:
                stats.IMAGES.labels("refused").inc()
                message = f"image {index + 1} of {len(fetches)} cannot be read: {error}"
                raise invalid(message, _fields(chat)[index]) from error
            stats.IMAGES.labels("read").inc()
            images.append(image)
            num_bytes += sum(len(tensor.data) for tensor in image.tensors.values())
            if num_bytes > MAX_TENSOR_BYTES:
                raise invalid(
                    f"image {index + 1} of {len(fetches)}: the images take more than {MAX_TENSOR_BYTES} bytes as "
                    "tensors; send fewer or smaller ones, or let the server reduce them (--mm-processor-kwargs)",
                    _fields(chat)[index],
                )
        return images

    async def _process(self, data: bytes) -> ProcessedImage:
        with stats.IMAGE_TIME.time():
            return await asyncio.wrap_future(self._threads.submit(self._work, data))

    def _work(self, data: bytes) -> ProcessedImage:
        worker = self._idle.get_nowait() or self._start_worker()  # there is one for each thread
        try:
            try:
                return self._processed(worker, data)
            except WorkerDiedError as error:
                logger.warning("%s; a new worker tries its image once more", error)
                return self._processed(worker, data)
        except WorkerDiedError as error:
            raise ImageError("it crashes the process that reads it") from error
        except WorkerTooSlowError as error:
            raise ImageError(f"reading it takes more than {MAX_SECONDS:g} seconds") from error
        finally:
            self._idle.put(worker)

    def _start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self._source.make)
        self._workers.append(worker)
        return worker

    def _processed(self, worker: WorkerProcess, data: bytes) -> ProcessedImage:
        image: ProcessedImage = worker.call("process", (data,), MAX_SECONDS)
        return image

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


def make_image_reader(config: TokenizerConfig, model_path: Path, tokenizer: LoadedTokenizer) -> ImageReader:
    """Returns the reader of the model's images. model_path: where its files are.

    Raises StartupError naming the flag that is wrong.
    """
    limit = image_limit(config.limit_mm_per_prompt)
    options = processor_options(config.mm_processor_kwargs or "{}")
    domains = tuple(name.strip() for name in (config.allowed_media_domains or "").split(",") if name.strip())
    try:
        media = MediaReader(
            allowed_domains=domains,
            allowed_path=config.allowed_local_media_path,
            max_bytes=config.max_image_bytes,
            timeout=config.media_fetch_timeout,
        )
    except ValueError as error:
        raise StartupError(str(error)) from error
    token_id = _image_token_id(model_path)
    if token_id is None:
        if config.tokenizer is not None and is_of_hub(config.model):
            logger.warning(
                "images are switched off: %s has no config.json of a model that reads images; if the model does, name "
                "its directory with --model",
                model_path,
            )
        return NoImages("this model reads no images")
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        reason = f"images cannot be read: {', '.join(missing)} is not installed; pip install 'pagewire[images]'"
        logger.warning(reason)
        return NoImages(reason)
    (token,) = tokenizer.vocabulary_entries([token_id])
    if not token:
        raise StartupError(
            f"{model_path / 'config.json'} names {token_id} as the placeholder token of images, which the tokenizer "
            "does not have; give --model and --tokenizer of the same model"
        )
    if not limit:
        return NoImages("images are switched off (--limit-mm-per-prompt image=0)")
    workers = ImageWorkers(
        ImageProcessorSource(str(model_path), token, config.max_image_pixels, options), token_id, media, limit
    )
    try:
        workers.check()
    except StartupError:
        workers.close()
        raise
    return workers


def _image_token_id(model_path: Path) -> int | None:
    """Returns the id of the placeholder token; None for a model that reads no images."""
    file = model_path / "config.json"
    if not file.is_file():
        return None
    try:
        raw = read_json_object(file)
    except ValueError as error:
        raise StartupError(str(error)) from error
    key = _IMAGE_TOKEN_KEYS.get(raw.get("model_type", ""))
    token_id = None if key is None else raw.get(key, raw.get("image_token_id"))
    if key is not None and not isinstance(token_id, int):
        raise StartupError(f"{file}: key {key} must name the placeholder token of images, found {token_id!r}")
    return token_id


def _fields(chat: ChatPrompt) -> list[str]:
    """Returns the field of each image in the request."""
    return [
        f"chat.messages[{i}].parts[{j}].image.url"
        for i, message in enumerate(chat.messages)
        for j, part in enumerate(message.parts)
        if part.HasField("image")
    ]


def _invalid(message: str) -> RpcError:
    """Returns an error about all images together."""
    return invalid(message, "chat.messages")
