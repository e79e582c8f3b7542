"""What a tokenizer worker does: prompts to token ids, token ids to text. The same in a thread and in a process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.files.tokenizer_files.loading import LoadedTokenizer, load_tokenizer
from pagewire.process.process import release_unused_memory
from pagewire.services.tokenizer.pool.input_encoding import Cuts, EncodedInput, encode_inputs
from pagewire.services.tokenizer.pool.sentence_config import read_sentence_config
from pagewire.services.tokenizer.pool.text_limit import Room, TextLimit
from pagewire.services.tokenizer.templates.chat import Chat, expand_images, render_chat

# Characters. What encoding them took, a hundred times as much, the C library would keep for the next one.
_LONG_TEXT = 256 * 1024


@dataclass(frozen=True)
class CodecSource:
    """Enough to make a Codec anywhere."""

    # Directory or .gguf file.
    path: str
    # Instead of the model's own; None = the model's own.
    chat_template: str | None = None
    # Render templates that come with requests; the pool does, elsewhere.
    trust_request_chat_template: bool = False


class Codec:
    """Thread-safe; its results are plain data."""

    def __init__(self, source: CodecSource) -> None:
        """Raises what load_tokenizer raises."""
        # The pool is where work runs in parallel; the library's own threads would only take cores from the model.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.path = Path(source.path)
        self.tokenizer: LoadedTokenizer = load_tokenizer(source.path)
        self.sentence_config = read_sentence_config(self.path)
        self.chat_template = source.chat_template or self.tokenizer.chat_template
        # Of chats with tools.
        self.tool_chat_template = source.chat_template or self.tokenizer.tool_chat_template or self.chat_template
        self.limit = TextLimit(self.tokenizer)

    def encode_text(self, text: str, add_special_tokens: bool, room: Room | None = None) -> list[int]:
        """Raises TextTooLong."""
        return self._encode(text, add_special_tokens, room)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """What each word may be as tokens: at the beginning, and after a space."""
        bare = [word.lstrip() or word for word in words]
        forms = dict.fromkeys(form for word in bare for form in (word, " " + word))
        encoded = (tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        return [list(token_ids) for token_ids in dict.fromkeys(encoded) if token_ids]

    def encode_mark(self, mark: str) -> list[int]:
        """What a model writes for it: one token if it is one."""
        token_id = self.tokenizer.backend.token_to_id(mark)
        return [token_id] if token_id is not None else self.tokenizer.encode(mark, add_special_tokens=False)

    def encode_inputs(
        self, texts: Sequence[tuple[str, str | None]], add_special_tokens: bool, cuts: Cuts
    ) -> list[EncodedInput]:
        """Raises ValueError; of a text that is too long TextTooLong."""
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
        """By the model's template. Raises ChatError or TextTooLong."""
        template = self.tool_chat_template if chat.tools else self.chat_template
        text = render_chat(chat, template, self.tokenizer.special_tokens, image_token)
        return self.encode_rendered(text, add_special_tokens, image_token, image_texts, room)

    def encode_rendered(
        self,
        text: str,
        add_special_tokens: bool,
        image_token: str = "",
        image_texts: Sequence[str] = (),
        room: Room | None = None,
    ) -> list[int]:
        """A chat's text. image_texts: what replaces its placeholders, image_token, in their order.

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
