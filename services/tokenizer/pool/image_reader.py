"""The interface through which images enter a prompt. `images/` implements it."""

from collections.abc import Sequence
from typing import Protocol

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.templates.chat_messages import image_urls
from pagewire.v1.common_pb2 import PromptImage
from pagewire.v1.inference_pb2 import ChatPrompt


class ChatImages(Protocol):
    """The images of one chat, in its order."""

    @property
    def texts(self) -> Sequence[str]:
        """The text that represents each in the prompt."""

    def placed(self, token_ids: Sequence[int]) -> Sequence[PromptImage]:
        """Returns the images as the executor reads them, each with its place in the prompt. Raises RpcError
        (INVALID_ARGUMENT)."""


class ImageReader(Protocol):
    """Reads the images of chats."""

    @property
    def image_token(self) -> str:
        """The text that a chat template shows for an image; "" if the model reads none."""

    async def read(self, chat: ChatPrompt) -> ChatImages:
        """Returns the images of a chat, or `NONE`. Raises RpcError (INVALID_ARGUMENT) if one cannot be read."""

    def close(self) -> None:
        """Ends its workers."""


class _None:
    """No images."""

    texts = ()

    def placed(self, token_ids: Sequence[int]) -> Sequence[PromptImage]:
        return ()


NONE: ChatImages = _None()


class NoImages:
    """Refuses images: the model reads none, or they are switched off."""

    image_token = ""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    async def read(self, chat: ChatPrompt) -> ChatImages:
        if image_urls(chat):
            raise invalid(self._reason, "chat.messages")
        return NONE

    def close(self) -> None:
        pass
