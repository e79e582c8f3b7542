"""A tokenizer as the services use it, whatever files it was loaded from."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from pagewire.files.tokenizer_files.fill_in_middle import FillInMiddle

# Applied in this order to the whole text, like transformers' clean_up_tokenization.
CLEAN_UPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


@dataclass(frozen=True)
class LoadedTokenizer:
    """Converts text to token ids and back, like transformers' tokenizer of the same files. Thread-safe."""

    backend: Tokenizer
    # The special tokens for chat templates, such as "bos_token" -> "<s>".
    special_tokens: dict[str, str]
    # The model's own template; None if it has none.
    chat_template: str | None
    clean_up_spaces: bool
    # The model's separate template for chats with tools, if there is one.
    tool_chat_template: str | None = None
    # The tokens by which the model fills in the middle of a text; None if it has none.
    fill_in_middle: FillInMiddle | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one, because encode() holds the interpreter lock all the time and encode_batch_fast() does not.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def leading_ids(self) -> list[int]:
        """Returns the special tokens that encoding adds before a text, such as BOS."""
        bare, whole = (self.encode("x", add_special_tokens=added) for added in (False, True))
        start = next(index for index in range(len(whole)) if whole[index : index + len(bare)] == bare)
        return whole[:start]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of a whole sequence. Leaves out ids that the vocabulary lacks."""
        (text,) = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        if self.clean_up_spaces:
            for pattern, content in CLEAN_UPS:
                text = text.replace(pattern, content)
        return text

    def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token as spelled in the vocabulary ("Ġthe"), "" for ids that it lacks."""
        id_to_token = self.backend.id_to_token
        return [id_to_token(token_id) or "" for token_id in token_ids]
