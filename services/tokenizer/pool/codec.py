"""The work of a tokenizer worker, in a thread or a process: turns prompts into token ids, and token ids into text."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.process.process import release_unused_memory
from pagewire.services.tokenizer.pool.bad_words import token_sequences
from pagewire.services.tokenizer.pool.infill import infill_ids
from pagewire.services.tokenizer.pool.input_encoding import Cuts, EncodedInput, encode_inputs
from pagewire.services.tokenizer.pool.sentence_config import read_sentence_config
from pagewire.services.tokenizer.pool.text_limit import Room, TextLimit
from pagewire.services.tokenizer.templates.chat import Chat, Fit, expand_images, render_chat

# Characters. Encoding takes a hundred times as much memory, which the C library would keep.
_LONG_TEXT = 256 * 1024


class CodecSource(Protocol):
    """Loads what a Codec needs, in any process."""

    @property
    def path(self) -> str:
        """A directory or a .gguf file."""

    @property
    def chat_template(self) -> str | None:
        """Replaces the model's own; None: the model's own."""

    @property
    def trust_request_chat_template(self) -> bool:
        """Returns whether templates of requests are rendered; the pool does it, in other processes."""

    @property
    def fit(self) -> Fit:
        """Fits conversations to templates."""

    def load(self) -> LoadedTokenizer: ...


class Codec:
    """Encodes and decodes. Thread-safe; its results are plain data."""

    def __init__(self, source: CodecSource) -> None:
        """Raises what source.load() raises."""
        # Work runs in parallel in the pool; the library's own threads would only take cores from the model.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.path = Path(source.path)
        self.tokenizer: LoadedTokenizer = source.load()
        self.sentence_config = read_sentence_config(self.path)
        self.chat_template = source.chat_template or self.tokenizer.chat_template
        # For chats with tools.
        self.tool_chat_template = source.chat_template or self.tokenizer.tool_chat_template or self.chat_template
        self._fit = source.fit
        self.limit = TextLimit(self.tokenizer)

    def encode_text(self, text: str, add_special_tokens: bool, room: Room | None = None) -> list[int]:
        """Returns the tokens of a text. Raises TextTooLong."""
        return self._encode(text, add_special_tokens, room)

    def encode_infill(self, prefix: str, suffix: str, add_special_tokens: bool, room: Room | None = None) -> list[int]:
        """Returns the tokens of a prompt in which the model fills in the middle. Raises TextTooLong."""
        fitted = self.limit.fitted
        return infill_ids(self.tokenizer, fitted(prefix, room), fitted(suffix, room), add_special_tokens)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the tokens that write one of the words, at the beginning of a word or inside one."""
        return token_sequences(self.tokenizer, words)

    def encode_mark(self, mark: str) -> list[int]:
        """Returns the tokens that a model writes for a mark: one if the vocabulary has it."""
        token_id = self.tokenizer.backend.token_to_id(mark)
        return [token_id] if token_id is not None else self.tokenizer.encode(mark, add_special_tokens=False)

    def encode_inputs(
        self, texts: Sequence[tuple[str, str | None]], add_special_tokens: bool, cuts: Cuts
    ) -> list[EncodedInput]:
        """Returns the tokens of texts or pairs. Raises ValueError, TextTooLong for a text that is too long."""
        fitted, (first, second) = self.limit.fitted, (cuts.room(is_second=False), cuts.room(is_second=True))
        texts = [(fitted(text, first), pair if pair is None else fitted(pair, second)) for text, pair in texts]
        if self.sentence_config.lowercases:
            texts = [(text.lower(), pair if pair is None else pair.lower()) for text, pair in texts]
        return encode_inputs(self.tokenizer.backend, texts, add_special_tokens=add_special_tokens, cuts=cuts)

    def encode_chat(
        self,
        chat: Chat,
        add_special_tokens: bool,
        image_token: str = "",
        image_texts: Sequence[str] = (),
        room: Room | None = None,
    ) -> list[int]:
        """Renders a chat by the model's template, and encodes it. Raises ChatError or TextTooLong."""
        template = self.tool_chat_template if chat.tools else self.chat_template
        text = render_chat(chat, template, self.tokenizer.special_tokens, image_token, self._fit)
        return self.encode_rendered(text, add_special_tokens, image_token, image_texts, room)

    def encode_rendered(
        self,
        text: str,
        add_special_tokens: bool,
        image_token: str = "",
        image_texts: Sequence[str] = (),
        room: Room | None = None,
    ) -> list[int]:
        """Encodes the text of a chat. image_texts: replace its placeholders (image_token), in their order.

        Raises ChatError or TextTooLong.
        """
        if image_texts:
            text = expand_images(text, image_token, image_texts)
        return self._encode(text, add_special_tokens, room)

    def _encode(self, text: str, add_special_tokens: bool, room: Room | None) -> list[int]:
        try:
            return self.tokenizer.encode(self.limit.fitted(text, room), add_special_tokens=add_special_tokens)
        finally:
            if len(text) > _LONG_TEXT:
                release_unused_memory()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        return self.tokenizer.vocabulary_entries(token_ids)
